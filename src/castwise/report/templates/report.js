// Draws the figures in the light or dark theme, and applies the choices of the controls.
(async () => {
  await loadPlotly();
  const figures = JSON.parse(await unpacked("figures"));
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const NARROW = 600;

  // Strings that are names of CSS variables become their values.
  const resolve = (value, style) => {
    if (typeof value === "string") return value.startsWith("--") ? style.getPropertyValue(value).trim() : value;
    if (Array.isArray(value)) return typeof value[value.length - 1] === "number" ? value : value.map((each) => resolve(each, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, resolve(each, style)]));
  };

  const controls = (name) => [...document.querySelectorAll("form[data-controls]")]
    .find((form) => form.dataset.controls.split(" ").includes(name));
  const matches = (name, query) => name.toLowerCase().includes(query.trim().toLowerCase());
  const chosen = (plot, figure) => {
    if (!figure.choices) return figure.rows ? { names: figure.rows, diagnosed: new Set() } : {};
    const given = new FormData(controls(plot.dataset.figure));
    const isKey = (name) => (figure.keys ? figure.keys.includes(name) : !["search", "all"].includes(name));
    const key = [...given].filter(([name]) => isKey(name)).map(([, value]) => value).join("/");
    const choice = figure.choices[key];
    if (!choice) return { data: figure.data.map(() => ({ x: [], y: [], z: [] })), caption: figure.missing || "Not in this run." };
    return choice.kind ? withRows(figure, choice, given.get("search"), given.has("all")) : choice;
  };

  const english = new Intl.NumberFormat("en"); // toLocaleString makes one for each number: slow for maps of many cells
  const stepText = (step) => (step === null ? "not sampled" : english.format(step));
  // A cell that is not finite has no colour of the scale: it is a square with a cross.
  const looks = (nonfinite, columns) => ({
    customdata: nonfinite,
    marker: {
      symbol: nonfinite.map((is) => (is ? "square-x" : "x")),
      size: nonfinite.map((is) => (is ? (columns > 24 ? 8 : 13) : 5)),
      color: nonfinite.map((is) => (is ? "--danger" : "--mark")),
      line: { color: nonfinite.map((is) => (is ? "--panel" : "--mark-line")), width: 1 },
    },
  });

  // A map of some modules, in model order: those that match, or those most at risk.
  const AT_FIRST = 24, ROW = 18;
  const withRows = (figure, choice, query, all) => {
    const names = figure.names[choice.kind], [cells, marks] = choice.data;
    const near = new Set(figure.worst.filter((name) => names.includes(name)).slice(0, AT_FIRST));
    const rows = [...names.keys()].filter((row) => (query ? matches(names[row], query) : all || near.has(names[row])));
    const place = new Map(rows.map((row, at) => [row, at]));
    const marked = [...marks.y.keys()].filter((at) => place.has(marks.y[at]));
    // Modules that were never finite look the same: one row is enough for all, and for all that have no fault.
    const isBad = (at) => marks.customdata[at] === 1;
    const oneRow = (name, z, isMarked) => ({
      names: [name],
      diagnosed: new Set(),
      data: [
        { x: cells.x, y: [0], z: [z], customdata: cells.customdata, text: [cells.customdata.map((step) => `${name}<br>step ${stepText(step)}`)] },
        isMarked ? { x: cells.x, y: cells.x.map(() => 0), ...looks(cells.x.map(() => 1), cells.x.length) } : { x: [], y: [] },
      ],
      height: 70 + ROW * 2,
    });
    if (rows.length > 1 && marked.filter(isBad).length === rows.length * cells.x.length) {
      return { ...oneRow(`all ${rows.length} modules`, cells.x.map(() => null), true), of: 0, shown: 0, caption: choice.caption };
    }
    const [lowest, highest] = figure.safe, known = rows.flatMap((row) => cells.z[row]).filter((value) => value !== null);
    const isCalm = known.length && known.every((value) => value >= lowest && value <= highest);
    if (isCalm && rows.length > 4 && !marked.length && !query && !all && !figure.diagnosed.length && document.body.dataset.runs === "1") {
      const worst = cells.x.map((_, column) => rows.map((row) => cells.z[row][column]).filter((value) => value !== null)
        .reduce((one, other) => (one === null || (lowest ? other < one : other > one) ? other : one), null));
      const caption = `${choice.caption} None of these ${rows.length} modules ever leaves the safest band: "all rows" shows each.`;
      return { ...oneRow(`worst of ${rows.length}`, worst, false), of: names.length, shown: rows.length, caption };
    }
    return {
      names: rows.map((row) => names[row]),
      of: names.length,
      shown: rows.length,
      caption: choice.caption,
      diagnosed: new Set(figure.diagnosed),
      data: [
        {
          x: cells.x,
          y: [...rows.keys()],
          z: rows.map((row) => cells.z[row]),
          customdata: cells.customdata,
          text: rows.map((row) => cells.customdata.map((step) => `${escaped(names[row])}<br>step ${stepText(step)}`)),
        },
        { x: marked.map((at) => marks.x[at]), y: marked.map((at) => place.get(marks.y[at])), ...looks(marked.map((at) => marks.customdata[at]), cells.x.length) },
      ],
      height: 70 + ROW * Math.max(rows.length, 4),
    };
  };

  // A finger scrolls the page.
  const canZoom = (plot) => ["timeline", "losses"].includes(plot.dataset.figure) && !matchMedia("(pointer: coarse)").matches;
  const layoutOf = (plot, figure, choice, style) => {
    const narrow = plot.clientWidth < NARROW;
    const layout = resolve({ ...figure.layout, ...choice.layout }, style);
    const ink = style.getPropertyValue("--ink").trim(), soft = style.getPropertyValue("--ink-soft").trim();
    const grid = style.getPropertyValue("--grid").trim(), panel = style.getPropertyValue("--panel").trim();
    for (const [key, axis] of Object.entries(layout)) {
      if (!/^[xy]axis/.test(key)) continue;
      const fixedrange = key !== "xaxis" || !canZoom(plot);
      Object.assign(axis, { gridcolor: grid, linecolor: grid, tickfont: { color: soft }, automargin: false, fixedrange });
      if (key !== "xaxis") axis.ticklabeloverflow = "allow"; // there is room for all, and measuring each takes long
      if (narrow && key === "xaxis") axis.nticks = 4;
      if (narrow && key === "xaxis" && axis.tickvals) {
        axis.ticktext = axis.ticktext.filter((_, at) => at % 2 === 0);
        axis.tickvals = axis.tickvals.filter((_, at) => at % 2 === 0);
      }
    }
    const letter = narrow ? 7 : 8, room = Math.min(30, Math.floor(0.37 * plot.clientWidth / letter)); // about a third
    const labels = choice.names && choice.names.map((name) => shortened(name, room));
    if (labels) {
      const danger = style.getPropertyValue("--danger").trim();
      const ticktext = labels.map((label, row) => (
        choice.diagnosed.has(choice.names[row]) ? `<b style="color:${danger}">▸ ${escaped(label)}</b>` : escaped(label)));
      Object.assign(layout.yaxis, { tickvals: [...labels.keys()], ticktext, range: [Math.max(labels.length, 1) - 0.5, -0.5] });
    }
    const longest = labels ? Math.max(...labels.map((label) => label.length + 2), 0) : 5;
    return {
      ...layout,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: narrow ? 12 : 14, color: ink },
      hoverlabel: { bgcolor: panel, bordercolor: soft, font: { color: ink } },
      margin: { l: 14 + longest * letter, r: narrow ? 8 : 16, t: labels ? 8 : 42, b: 48 },
      height: choice.height || figure.height,
      dragmode: canZoom(plot) ? "zoom" : false,
      uirevision: "kept", // a zoom outlasts a change of the theme
    };
  };

  // A legend of several rows makes the figure taller, not its plots smaller. How tall it is, is known once it is drawn:
  // a figure with the same names and width gets that height at once, because a second layout takes as long as the first.
  const LEGEND_ROW = 20, legends = new Map();
  const withRoom = ({ height, margin }, more) => ({ height: height + more, margin: { ...margin, t: margin.t + more } });
  const roomOf = (plot) => {
    const legend = plot.querySelector(".legend .bg");
    return legend ? Math.max(0, Math.round(legend.getBoundingClientRect().height) - LEGEND_ROW) : 0;
  };

  const draw = async (plot) => {
    const figure = figures[plot.id], style = getComputedStyle(document.documentElement);
    const choice = chosen(plot, figure);
    plot.names = choice.names;
    if (choice.height) {
      plot.style.height = `${choice.height}px`;
      const shown = document.querySelector(`[data-rows="${plot.id.split("-").pop()}"]`);
      shown.textContent = choice.shown < choice.of ? `${choice.shown} of ${choice.of} modules: ` +
        "those most at risk, or with matching names." : choice.of > 1 ? `All ${choice.of} modules.` : choice.of ? "" :
        "No module was finite in any sample.";
    }
    const data = figure.data.map((trace, place) => resolve({ ...trace, ...(choice.data || [])[place] }, style));
    const caption = figure.choices && document.getElementById(`${plot.id}-caption`);
    if (caption) caption.innerHTML = "", caption.append(...powers(choice.caption || ""));
    const layout = layoutOf(plot, figure, choice, style);
    const names = data.map((trace) => String(trace.name).replace(/\d+/g, "")); // their numbers hardly change the width
    const key = JSON.stringify([plot.clientWidth, names]), expected = legends.get(key) || 0;
    await Plotly.react(plot, data, { ...layout, ...withRoom(layout, expected) }, { displayModeBar: false, responsive: true });
    const room = roomOf(plot);
    legends.set(key, room);
    plot.style.height = `${layout.height + room}px`;
    if (room !== expected) await Plotly.relayout(plot, withRoom(layout, room));
  };

  const powers = (text) => text.split(/(2\^-?\d[\d.]*\d|2\^-?\d)/).flatMap((part) => {
    if (!part.startsWith("2^")) return [part];
    const exponent = document.createElement("sup");
    exponent.textContent = part.slice(2).replace("-", "\u2212");
    return ["2", exponent];
  });

  // Describe a map cell in words, for touch, keyboard and screen readers.
  const read = (plot, row, column) => {
    const names = plot.names, cells = plot.data[0];
    const value = cells.z[row][column], headroom = plot.dataset.figure === "headroom_bits";
    const isMarked = plot.data[1].y.some((each, place) => each === row && plot.data[1].x[place] === cells.x[column]);
    const words = value === null || value === undefined ? (isMarked ? "inf or NaN" : "all zero, or not sampled")
      : headroom ? (value < 0 ? `overflows by ${-value} bits` : `${value} bits of headroom`)
      : `${+(100 * value).toPrecision(2)}% rounds to zero`;
    document.querySelector(`[data-for="${plot.id}"]`).textContent =
      `${names[row]}, step ${stepText(cells.customdata[column])}: ${words}`;
  };
  const walk = (plot) => {
    let row = 0, column = 0;
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const clamp = (value, count) => Math.max(0, Math.min(count - 1, value));
    plot.tabIndex = 0;
    plot.addEventListener("keydown", (event) => {
      const cells = plot.data[0];
      if (!(event.key in moves) || !cells.z.length || !cells.x.length) return;
      event.preventDefault();
      row = clamp(row + moves[event.key][0], cells.z.length);
      column = clamp(column + moves[event.key][1], cells.x.length);
      Plotly.Fx.hover(plot, { xval: cells.x[column], yval: row }, "xy");
      read(plot, row, column);
    });
    plot.on("plotly_hover", ({ points: [point] }) => {
      if (point.curveNumber === 0) [row, column] = point.pointNumber, read(plot, row, column);
    });
  };

  const plots = [...document.querySelectorAll(".plot")];
  const redraw = () => Promise.all(plots.map(draw));
  // When the page opens, what is on the screen comes first, and the browser paints and answers between two figures.
  const isSeen = (plot) => {
    const { top, bottom } = plot.getBoundingClientRect();
    return top < window.innerHeight && bottom > 0;
  };
  const drawAll = async () => {
    for (const left = [...plots]; left.length;) {
      await draw(...left.splice(Math.max(left.findIndex(isSeen), 0), 1));
      await new Promise((resolve) => { setTimeout(resolve); });
    }
  };
  drawAll().then(() => {
    plots.filter((plot) => document.querySelector(`[data-for="${plot.id}"]`)).forEach(walk);
    document.documentElement.dataset.drawn = plots.length;
  });
  dark.addEventListener("change", redraw);
  document.getElementById("theme").addEventListener("change", ({ target }) => {
    document.documentElement.dataset.theme = target.value;
    redraw();
  });
  for (const form of document.querySelectorAll("form")) form.addEventListener("submit", (event) => event.preventDefault());
  for (const form of document.querySelectorAll("form[data-controls]")) {
    const choose = () => plots
      .filter((plot) => form.dataset.controls.split(" ").includes(plot.dataset.figure)).forEach((plot) => {
        draw(plot);
        const readout = document.querySelector(`[data-for="${plot.id}"]`);
        if (readout) readout.textContent = ""; // it described the previous selection
      });
    form.addEventListener("change", choose);
    if (form.elements.search) form.elements.search.addEventListener("input", choose);
  }
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if ((window.innerWidth < NARROW) !== (width < NARROW)) redraw();
    width = window.innerWidth;
  });
})();

// Search and sort module tables.
(() => {
  const search = document.querySelector("form[data-modules]");
  const rows = [...document.querySelectorAll(".modules tbody tr")];
  const filter = () => {
    const query = search.elements.search.value.trim().toLowerCase();
    for (const row of rows) row.hidden = !row.cells[0].dataset.value.toLowerCase().includes(query);
    const count = rows.filter((row) => !row.hidden).length;
    search.querySelector("output").textContent = `${count} of ${rows.length}`;
  };
  search.addEventListener("input", filter);
  filter();

  for (const head of document.querySelectorAll(".modules thead th")) {
    head.querySelector("button").addEventListener("click", () => {
      const column = head.cellIndex, body = head.closest("table").tBodies[0];
      const rising = head.getAttribute("aria-sort") !== "ascending";
      for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", rising ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.value;
      const order = (one, other) => (column ? key(one) - key(other) : key(one).localeCompare(key(other), "en", { numeric: true }));
      const [known, unknown] = [true, false].map((is) => [...body.rows].filter((row) => (key(row) !== undefined) === is));
      known.sort((one, other) => (rising ? 1 : -1) * order(one, other));
      body.append(...known, ...unknown);
    });
  }
})();
