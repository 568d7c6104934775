"""What any network is trained with: task, optimiser, loop, checkpoints, several processes, CUDA graphs."""
