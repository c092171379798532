// Draws the figures, in the colours of light or dark, and applies what the controls choose.
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
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
  const chosen = (plot, figure) => {
    if (!figure.choices) return {};
    const key = [...new FormData(controls(plot.dataset.figure)).values()].join("/");
    return figure.choices[key] || { data: figure.data.map(() => ({ x: [], y: [], z: [] })), caption: "Not in this run." };
  };

  // The end of a module's name tells more than its beginning. Entities such as &lt; are one character.
  const shortened = (label, room) => {
    const characters = label.match(/&\w+;|[^]/gu) || [];
    return characters.length <= room ? label : "…" + characters.slice(1 - room).join("").replace(/^\./, "");
  };

  const layoutOf = (plot, figure, choice, style) => {
    const narrow = plot.clientWidth < NARROW;
    const layout = resolve({ ...figure.layout, ...choice.layout }, style);
    const ink = style.getPropertyValue("--ink").trim(), soft = style.getPropertyValue("--ink-soft").trim();
    const grid = style.getPropertyValue("--grid").trim(), panel = style.getPropertyValue("--panel").trim();
    for (const [key, axis] of Object.entries(layout)) {
      if (!/^[xy]axis/.test(key)) continue;
      Object.assign(axis, { gridcolor: grid, linecolor: grid, tickfont: { color: soft }, automargin: false });
      if (narrow && key === "xaxis") axis.nticks = 4;
    }
    const labels = choice.labels && choice.labels.map((label) => shortened(label, narrow ? 15 : 26));
    if (labels) {
      Object.assign(layout.yaxis, { tickvals: [...labels.keys()], ticktext: labels, range: [labels.length - 0.5, -0.5] });
    }
    const longest = labels ? Math.max(...labels.map((label) => label.replace(/&\w+;/g, "x").length), 0) : 5;
    return {
      ...layout,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: narrow ? 12 : 14, color: ink },
      hoverlabel: { bgcolor: panel, bordercolor: soft, font: { color: ink } },
      margin: { l: 14 + longest * (narrow ? 7 : 8), r: narrow ? 8 : 16, t: labels ? 8 : 42, b: 48 },
      height: figure.height,
      dragmode: false,
    };
  };

  const draw = (plot) => {
    const figure = figures[plot.id], style = getComputedStyle(document.documentElement);
    const choice = chosen(plot, figure);
    const data = figure.data.map((trace, place) => resolve({ ...trace, ...(choice.data || [])[place] }, style));
    const caption = choice.caption && document.getElementById(`${plot.id}-caption`);
    if (caption) caption.innerHTML = "", caption.append(...powers(choice.caption));
    return Plotly.react(plot, data, layoutOf(plot, figure, choice, style), { displayModeBar: false, responsive: true });
  };

  const powers = (text) => text.split(/(2\^-?\d[\d.]*\d|2\^-?\d)/).flatMap((part) => {
    if (!part.startsWith("2^")) return [part];
    const exponent = document.createElement("sup");
    exponent.textContent = part.slice(2).replace("-", "\u2212");
    return ["2", exponent];
  });

  // What a cell of a map says, in words: for fingers, keys and screen readers.
  const read = (plot, row, column) => {
    const names = chosen(plot, figures[plot.id]).names, cells = plot.data[0];
    const value = cells.z[row][column], headroom = plot.dataset.figure === "headroom_bits";
    const isMarked = plot.data[1].y.some((each, place) => each === row && plot.data[1].x[place] === cells.x[column]);
    const words = value === null ? (isMarked ? "inf or NaN" : "all zero, or not sampled")
      : headroom ? (value < 0 ? `overflows by ${-value} bits` : `${value} bits of headroom`)
      : `${+(100 * value).toPrecision(2)}% rounds to zero`;
    document.querySelector(`[data-for="${plot.id}"]`).textContent =
      `${names[row]}, step ${cells.x[column].toLocaleString("en")}: ${words}`;
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
  redraw().then(() => {
    plots.filter((plot) => document.querySelector(`[data-for="${plot.id}"]`)).forEach(walk);
    document.documentElement.dataset.drawn = plots.length;
  });
  dark.addEventListener("change", redraw);
  for (const form of document.querySelectorAll("form[data-controls]")) {
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("change", () => plots
      .filter((plot) => form.dataset.controls.split(" ").includes(plot.dataset.figure)).forEach((plot) => {
        draw(plot);
        const readout = document.querySelector(`[data-for="${plot.id}"]`);
        if (readout) readout.textContent = ""; // it told of what was shown before
      }));
  }
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if ((window.innerWidth < NARROW) !== (width < NARROW)) redraw();
    width = window.innerWidth;
  });
})();
