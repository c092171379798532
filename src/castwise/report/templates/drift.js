// Draws the error of each module and the frontier, in the light or dark theme.
(async () => {
  await loadPlotly();
  const figures = JSON.parse(await unpacked("figures"));
  const controls = document.getElementById("bars-controls");
  const NARROW = 600, ROW = 26;

  // plotly interprets some HTML in text.
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  // The end of a module name is more informative than its start.
  const shortened = (name, room) => {
    const characters = [...name], first = Math.floor(room / 4);
    if (characters.length <= room) return name;
    return `${characters.slice(0, first).join("")}…${characters.slice(first + 1 - room).join("")}`;
  };
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const layout = (plot, own) => {
    const axis = { gridcolor: color("--grid"), linecolor: color("--grid"), tickfont: { color: color("--ink-soft") }, zeroline: false };
    return {
      ...own,
      xaxis: { ...axis, ...own.xaxis },
      yaxis: { ...axis, ...own.yaxis },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: plot.clientWidth < NARROW ? 12 : 14, color: color("--ink") },
      hoverlabel: { bgcolor: color("--panel"), bordercolor: color("--ink-soft"), font: { color: color("--ink") } },
      dragmode: false,
    };
  };
  // Errors below 1e-8 are those of fp32 itself.
  const decades = (values) => {
    const logs = values.filter((each) => each !== null).map(Math.log10);
    return [Math.max(Math.floor(Math.min(...logs, -3)), -8), Math.max(...logs, -2) + 0.1];
  };
  const options = { displayModeBar: false, responsive: true };

  const drawBars = () => {
    const plot = document.getElementById("bars"), given = new FormData(controls);
    const policy = figures.bars[given.get("policy")], query = given.get("search").trim().toLowerCase();
    const atFirst = Number(plot.dataset.atFirst);
    plot.hidden = Boolean(policy.failure);
    if (policy.failure) {
      document.getElementById("bars-caption").textContent = `Nothing to draw: ${policy.failure}.`;
      return undefined;
    }
    const rows = [...policy.names.keys()].filter((row) => (
      query ? policy.names[row].toLowerCase().includes(query) : given.has("all") || policy.rank[row] < atFirst));
    const letter = plot.clientWidth < NARROW ? 7 : 8, room = Math.min(36, Math.floor(0.37 * plot.clientWidth / letter));
    const labels = rows.map((row) => escaped(shortened(policy.names[row], room)));
    const bars = (key, name, hue) => ({
      type: "bar",
      orientation: "h",
      name,
      x: rows.map((row) => policy[key][row]),
      y: [...rows.keys()],
      marker: { color: color(hue) },
      text: rows.map((row) => `${escaped(policy.names[row])}<br>${escaped(policy.captions[row])}`),
      textposition: "none",
      hovertemplate: `%{text}<br>${name} %{x:.2e}<extra></extra>`,
    });
    const height = 110 + ROW * Math.max(rows.length, 2);
    plot.style.height = `${height}px`;
    const longest = Math.max(...labels.map((label) => label.length), 5);
    document.getElementById("bars-caption").textContent = rows.length < policy.names.length
      ? `${rows.length} of ${policy.names.length} modules: those with the largest effects, or with matching names.`
      : `All ${policy.names.length} modules.`;
    return Plotly.react(plot, [bars("introduced", "introduced", "--accent"), bars("carried", "carried", "--muted-bar")], layout(plot, {
      height,
      barmode: "group",
      bargap: 0.25,
      margin: { l: 14 + longest * letter, r: 16, t: 42, b: 48 },
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" },
      xaxis: { type: "log", title: { text: "relative error" }, exponentformat: "power", range: decades([...rows.map((row) => policy.introduced[row]), ...rows.map((row) => policy.carried[row])]), dtick: plot.clientWidth < NARROW ? 2 : 1 },
      yaxis: { tickvals: [...rows.keys()], ticktext: labels, range: [Math.max(rows.length, 1) - 0.5, -0.5] },
    }), options);
  };

  const drawFrontier = () => {
    const plot = document.getElementById("frontier-plot"), found = figures.frontier;
    if (!plot || !found) return undefined;
    const least = Math.min(...found.error.filter((each) => each > 0), found.tolerance);
    const shown = found.error.map((each) => (each > 0 ? each : least / 10));
    const text = found.error.map((each, at) => `${found.compute[at]}, ${found.captions[at]}<br>error ${each.toExponential(2)}`);
    const chosen = [...found.chosen.keys()].filter((at) => found.chosen[at]);
    const hover = { hovertemplate: "%{text}<br>cost %{x:.3f}<extra></extra>" };
    return Plotly.react(plot, [
      { type: "scatter", mode: "lines+markers", name: "policies", x: found.cost, y: shown, text, marker: { color: color("--accent"), size: 8 }, line: { color: color("--accent") }, ...hover },
      { type: "scatter", mode: "markers", name: "chosen", x: chosen.map((at) => found.cost[at]), y: chosen.map((at) => shown[at]), text: chosen.map((at) => text[at]), marker: { color: color("--danger"), size: 14, symbol: "diamond" }, ...hover },
    ], layout(plot, {
      height: 380,
      margin: { l: 70, r: 16, t: 42, b: 52 },
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" },
      xaxis: { title: { text: `cost over float32 (${found.kind})` } },
      yaxis: { type: "log", title: { text: "error of the loss" }, exponentformat: "power", dtick: 1 },
      shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: found.tolerance, y1: found.tolerance, line: { color: color("--ink-soft"), width: 1.5, dash: "dash" } }],
    }), options);
  };

  const redraw = () => Promise.all([drawBars(), drawFrontier()]);
  const choose = () => {
    drawBars();
    for (const table of document.querySelectorAll(".effects")) table.hidden = table.dataset.policy !== controls.elements.policy.value;
    const query = controls.elements.search.value.trim().toLowerCase();
    for (const row of document.querySelectorAll(".effects tbody tr")) row.hidden = !row.cells[0].dataset.value.toLowerCase().includes(query);
  };
  redraw().then(() => { document.documentElement.dataset.drawn = document.querySelectorAll(".plot").length; });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.getElementById("theme").addEventListener("change", ({ target }) => {
    document.documentElement.dataset.theme = target.value;
    redraw();
  });
  for (const form of document.querySelectorAll("form")) form.addEventListener("submit", (event) => event.preventDefault());
  controls.addEventListener("change", choose);
  controls.elements.search.addEventListener("input", choose);
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if ((window.innerWidth < NARROW) !== (width < NARROW)) redraw();
    width = window.innerWidth;
  });
})();
