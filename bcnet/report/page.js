// Draws the charts of the page, in the colours of its style sheet, and again when those change.
(async function () {
  "use strict";
  // Plotly is packed, which makes the page less than half as large.
  const unpacked = new Blob([base85(document.getElementById("plotly").textContent)]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(unpacked).text();
  document.head.append(script);

  // Five characters are four bytes; "/" stands for "<", which a page had better not hold.
  function base85(text) {
    const letters = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;/=>?@^_`{|}~";
    const missing = (5 - text.length % 5) % 5;
    text += "~".repeat(missing);
    const values = new Uint8Array(128), bytes = new DataView(new ArrayBuffer(text.length / 5 * 4));
    for (let i = 0; i < 85; i++) values[letters.charCodeAt(i)] = i;
    for (let i = 0; i < text.length; i += 5) {
      let number = 0;
      for (let j = i; j < i + 5; j++) number = 85 * number + values[text.charCodeAt(j)];
      bytes.setUint32(i / 5 * 4, number);
    }
    return bytes.buffer.slice(0, bytes.byteLength - missing);
  }

  const charts = JSON.parse(document.getElementById("charts").textContent);
  let styles, printing = false;

  // "--found" in a figure stands for the colour of that name.
  function coloured(value) {
    if (typeof value === "string") return value.startsWith("--") ? styles.getPropertyValue(value).trim() || value : value;
    if (Array.isArray(value)) return value.map(coloured);
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v)]));
    return value;
  }

  function axis(given) {
    return Object.assign({ gridcolor: "--grid", linecolor: "--rule", zerolinecolor: "--rule", tickcolor: "--rule", ticks: "",
      automargin: true, fixedrange: true, tickfont: { color: "--soft", size: 12 } }, given,
      { title: Object.assign({ font: { color: "--soft", size: 12.5 }, standoff: 10 }, (given || {}).title) });
  }

  function layout(given) {
    return coloured(Object.assign({}, given, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest", dragmode: false,
      font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif", color: "--ink", size: 13 },
      margin: { l: 8, r: 8, t: given.showlegend === false ? 10 : 34, b: 8 },
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1, yanchor: "bottom", font: { size: 12.5, color: "--soft" },
        itemclick: false, itemdoubleclick: false },
      hoverlabel: { bgcolor: "--ink", bordercolor: "--ink", font: { color: "--paper", size: 13, family: "system-ui, sans-serif" }, align: "left", namelength: -1 },
      xaxis: axis(given.xaxis), yaxis: axis(given.yaxis),
    }));
  }

  // Paper has a size of its own, which the page does not know while it is on the screen.
  function size(id) {
    if (!printing) return { autosize: true };
    const chart = document.getElementById(id);
    return { autosize: false, width: chart.closest(".pair") ? 325 : 680, height: chart.classList.contains("low") ? 230 : 280 };
  }

  function draw(id) {
    const figure = charts[id];
    const whole = Object.assign(layout(figure.layout), size(id));
    Plotly.react(id, coloured(figure.data), whole, { displayModeBar: false, responsive: true })
      .then(() => document.getElementById(id).setAttribute("data-drawn", "yes"));
  }

  function drawAll() {
    styles = getComputedStyle(document.documentElement);
    Object.keys(charts).forEach(draw);
  }

  function print(begins) {
    if (begins && printing) return;
    printing = begins;  // the end is told twice, and only the later time is the paper's size surely gone
    drawAll();
    if (!begins) Object.keys(charts).forEach((id) => Plotly.Plots.resize(id));
  }

  // Every chart as a picture or as the numbers it is drawn from.
  function save(name, text) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    link.download = name;
    link.click();
  }

  function csv(id) {
    const rows = ["series,x,y"];
    charts[id].data.forEach((trace) => (trace.x || []).forEach((x, i) => {
      rows.push([trace.name || id, x, trace.y[i]].map((value) => JSON.stringify(value === undefined ? null : value)).join(","));
    }));
    return rows.join("\n") + "\n";
  }

  function offer(id) {
    const line = document.createElement("p");
    line.className = "take";
    const picture = document.createElement("button"), numbers = document.createElement("button");
    picture.textContent = "PNG";
    numbers.textContent = "CSV";
    picture.addEventListener("click", () => Plotly.downloadImage(id, { format: "png", scale: 2, filename: id }));
    numbers.addEventListener("click", () => save(id + ".csv", csv(id)));
    line.append(picture, numbers);
    document.getElementById(id).after(line);
  }

  // A point of the front: its widths, its costs, and the command that makes a network of it.
  function pick(event) {
    const chosen = event.points[0].customdata;
    if (!chosen) return;
    const place = document.getElementById("picked");
    place.querySelector("p").textContent = chosen[0];
    place.querySelector("pre").textContent = chosen[1];
    place.hidden = false;
  }

  const picker = document.getElementById("fairness-variable");
  if (picker) picker.addEventListener("change", () => {
    const each = charts.fairness.data.length / picker.options.length;
    charts.fairness.data.forEach((trace, i) => { trace.visible = Math.floor(i / each) === picker.selectedIndex; });
    draw("fairness");
    document.getElementById("fairness-verdict").textContent = picker.selectedOptions[0].dataset.verdict;
  });

  // A chart that was folded away when it was drawn had no width then.
  document.querySelectorAll("details").forEach((part) => part.addEventListener("toggle", () =>
    part.querySelectorAll(".chart").forEach((chart) => Plotly.Plots.resize(chart))));

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  matchMedia("print").addEventListener("change", (event) => print(event.matches));
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  drawAll();
  Object.keys(charts).forEach(offer);
  const front = document.getElementById("front");
  if (front) front.on("plotly_click", pick);
})();
