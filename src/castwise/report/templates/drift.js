// Draws the error of each module and the frontier, in the light or dark theme.
(async () => {
  const canDraw = await loadPlotly();
  const figures = JSON.parse(await unpacked("figures"));
  const controls = document.getElementById("bars-controls");
  const NARROW = 600, ROW = 26;

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const layout = (plot, own) => {
    const axis = { gridcolor: color("--grid"), linecolor: color("--grid"), tickfont: { color: color("--ink-soft") }, zeroline: false };
    return {
      ...own,
      xaxis: { ...axis, ...own.xaxis },
      yaxis: { ...axis, ticklabeloverflow: "allow", ...own.yaxis }, // there is room for all, and measuring each takes long
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: plot.clientWidth < NARROW ? 12 : 14, color: color("--ink") },
      hoverlabel: { bgcolor: color("--panel"), bordercolor: color("--ink-soft"), font: { color: color("--ink") } },
      dragmode: false,
    };
  };
  // Errors below 1e-8 are those of fp32 itself.
  const decades = (values) => {
    const logs = values.filter((each) => each > 0).map(Math.log10);
    return [Math.max(Math.floor(Math.min(...logs, -3)), -8), Math.max(...logs, -2) + 0.3];
  };
  const options = { displayModeBar: false, responsive: true };

  const drawBars = () => {
    const plot = document.getElementById("bars");
    if (!plot) return undefined;
    const given = new FormData(controls), policy = figures.bars[given.get("policy")];
    const query = given.get("search").trim().toLowerCase(), atFirst = Number(plot.dataset.atFirst);
    const rows = [...policy.names.keys()].filter((row) => (
      query ? policy.names[row].toLowerCase().includes(query) : given.has("all") || policy.rank[row] < atFirst));
    const letter = plot.clientWidth < NARROW ? 7 : 8, room = Math.min(36, Math.floor(0.37 * plot.clientWidth / letter));
    const labels = rows.map((row) => escaped(shortened(policy.names[row], room)));
    const range = decades(["introduced", "carried"].flatMap((key) => rows.map((row) => policy[key][row])));
    // No logarithmic axis has a 0: its bar has no length, and says so. One that is not finite is hatched.
    const shown = (value) => (value === "inf" ? 10 ** range[1] : value === null ? null : Math.max(value, 10 ** range[0]));
    const bars = (key, name, hue) => {
      const values = rows.map((row) => policy[key][row]);
      return {
        type: "bar",
        orientation: "h",
        name,
        x: values.map(shown),
        y: [...rows.keys()],
        marker: { color: color(hue), pattern: { shape: values.map((value) => (value === "inf" ? "x" : "")) } },
        customdata: rows.map((row, at) => `${escaped(policy.names[row])}<br>${escaped(policy.captions[row])}<br>${name} ${
          values[at] === null ? "not known" : values[at] === "inf" ? "inf" : values[at] && values[at].toExponential(2)}`),
        text: values.map((value) => (value === 0 ? "0" : value === "inf" ? "not finite" : "")),
        textposition: values.map((value) => (value === "inf" ? "inside" : "outside")),
        textfont: { size: 10, color: color("--ink-soft") },
        insidetextfont: { size: 11, color: color("--panel") },
        cliponaxis: false,
        hovertemplate: "%{customdata}<extra></extra>",
      };
    };
    const height = 110 + ROW * Math.max(rows.length, 2);
    plot.style.height = `${height}px`;
    const longest = Math.max(...labels.map((label) => label.length), 5);
    document.getElementById("bars-caption").textContent = rows.length < policy.names.length
      ? `${rows.length} of ${policy.names.length} modules: those that shift the loss most, or with matching names.`
      : `All ${policy.names.length} modules.`;
    return Plotly.react(plot, [bars("introduced", "introduced", "--accent"), bars("carried", "carried", "--muted-bar")], layout(plot, {
      height,
      barmode: "group",
      bargap: 0.25,
      margin: { l: 14 + longest * letter, r: 16, t: 42, b: 48 },
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" },
      xaxis: { type: "log", title: { text: "relative error" }, exponentformat: "power", range, dtick: plot.clientWidth < NARROW ? 2 : 1 },
      yaxis: { tickvals: [...rows.keys()], ticktext: labels, range: [Math.max(rows.length, 1) - 0.5, -0.5] },
    }), options);
  };

  const drawFrontier = () => {
    const plot = document.getElementById("frontier-plot"), found = figures.frontier;
    if (!plot || !found) return undefined;
    const narrow = plot.clientWidth < NARROW, positive = [...found.error.filter((each) => each > 0), found.tolerance];
    // No logarithmic axis has a 0, so it stands a power of ten below the others.
    const lowest = Math.floor(Math.log10(Math.min(...positive))), highest = Math.ceil(Math.log10(Math.max(...positive)));
    const hasZero = found.error.includes(0), zero = 10 ** (lowest - 1), step = Math.ceil((highest - lowest) / 8) || 1;
    const powers = [];
    for (let exponent = lowest; exponent <= highest; exponent += step) powers.push(exponent);
    const shown = found.error.map((each) => (each > 0 ? each : zero));
    const hover = found.error.map((each, at) => `${escaped(found.labels[at])}<br>error ${each && each.toExponential(2)}`);
    const chosen = [...found.chosen.keys()].filter((at) => found.chosen[at]), last = found.cost.length - 1;
    const label = (at) => (narrow ? `${found.numbers[at]}` : `${found.numbers[at]}: ${escaped(found.labels[at])}`);
    const side = (at) => (at % 2 || (at && at === last) ? "bottom left" : "top right"); // beside a line that falls
    const texts = { hovertemplate: "%{customdata}<br>cost %{x:.3f}<extra></extra>" };
    return Plotly.react(plot, [
      { type: "scatter", mode: "lines+markers+text", name: "policies", x: found.cost, y: shown, customdata: hover, text: found.cost.map((_, at) => label(at)), textposition: found.cost.map((_, at) => side(at)), textfont: { size: 12, color: color("--ink") }, cliponaxis: false, marker: { color: color("--accent"), size: 8 }, line: { color: color("--accent") }, ...texts },
      { type: "scatter", mode: "markers", name: "chosen", x: chosen.map((at) => found.cost[at]), y: chosen.map((at) => shown[at]), customdata: chosen.map((at) => hover[at]), marker: { color: color("--danger"), size: 14, symbol: "diamond" }, ...texts },
    ], layout(plot, {
      height: 380,
      margin: { l: 70, r: 16, t: 42, b: 52 },
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" },
      xaxis: { title: { text: `cost over float32 (${found.kind})` } },
      yaxis: {
        type: "log",
        title: { text: "error of the loss" },
        range: [hasZero ? lowest - 1.5 : lowest - 0.3, highest + 0.3],
        tickvals: [...(hasZero ? [zero] : []), ...powers.map((exponent) => 10 ** exponent)],
        ticktext: [...(hasZero ? ["0"] : []), ...powers.map((exponent) => `10<sup>${String(exponent).replace("-", "\u2212")}</sup>`)],
      },
      shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: found.tolerance, y1: found.tolerance, line: { color: color("--ink-soft"), width: 1.5, dash: "dash" } }],
      annotations: [{ xref: "paper", x: 1, xanchor: "right", yref: "y", y: Math.log10(found.tolerance), yanchor: "bottom", text: "tolerance", showarrow: false, font: { size: 12, color: color("--ink-soft") } }],
    }), options);
  };

  const redraw = () => (canDraw ? Promise.all([drawBars(), drawFrontier()]) : Promise.resolve());
  const choose = () => {
    if (canDraw) drawBars();
    for (const table of document.querySelectorAll(".effects")) table.hidden = table.dataset.policy !== controls.elements.policy.value;
    const query = controls.elements.search.value.trim().toLowerCase();
    for (const row of document.querySelectorAll(".effects tbody tr")) row.hidden = !row.cells[0].dataset.value.toLowerCase().includes(query);
  };
  redraw().then(() => { document.documentElement.dataset.drawn = document.querySelectorAll(".plot").length; });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.getElementById("theme").addEventListener("change", redraw);
  if (controls) {
    controls.addEventListener("change", choose);
    controls.elements.search.addEventListener("input", choose);
  }
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if ((window.innerWidth < NARROW) !== (width < NARROW)) redraw();
    width = window.innerWidth;
  });
})();

// Without plotly: the theme, and the order and the rows of the heat map.
(() => {
  document.getElementById("theme").addEventListener("change", ({ target }) => {
    document.documentElement.dataset.theme = target.value;
  }, { capture: true });
  for (const form of document.querySelectorAll("form")) form.addEventListener("submit", (event) => event.preventDefault());
  const form = document.getElementById("heat-controls"), body = document.querySelector(".heat tbody");
  if (!form || !body) return;
  const rows = [...body.rows], atFirst = rows.filter((row) => !row.classList.contains("more")).length;
  const arrange = () => {
    const given = new FormData(form), measure = given.get("measure"), query = (given.get("search") || "").trim().toLowerCase();
    if (measure) rows.sort((one, other) => one.dataset[measure] - other.dataset[measure]);
    rows.forEach((row, at) => {
      row.classList.toggle("more", at >= atFirst);
      row.hidden = !row.dataset.name.toLowerCase().includes(query);
    });
    document.getElementById("map").classList.toggle("searching", query !== "");
    body.append(...rows);
  };
  form.addEventListener("change", arrange);
  form.addEventListener("input", arrange);
})();
