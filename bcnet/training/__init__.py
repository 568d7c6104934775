"""What any network is trained with: task, optimizer, loop, checkpoints, several processes, CUDA graphs."""
