// Unpacks what a page holds as base64 of gzip: its figures, and the library that draws them unless that is in a file.
"use strict";
const bytes = (text) => (Uint8Array.fromBase64 ? Uint8Array.fromBase64(text)
  : Uint8Array.from(atob(text), (each) => each.charCodeAt(0)));
const unpacked = async (id) => {
  const packed = bytes(document.getElementById(id).textContent);
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
};
// plotly interprets some HTML in text.
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
// Like names in the tables: the end of a module name is more informative than its start.
const shortened = (name, room) => {
  const characters = [...name], first = Math.floor(room / 4);
  if (characters.length <= room) return name;
  return `${characters.slice(0, first).join("")}…${characters.slice(first + 1 - room).join("")}`;
};
// Returns whether there is a library; where figures would be, the page says which file is missing.
const loadPlotly = async () => {
  const holder = document.getElementById("plotly"), script = document.createElement("script"), { url } = holder.dataset;
  if (!url) {
    script.textContent = await unpacked("plotly");
    document.head.append(script);
    return true;
  }
  script.nonce = holder.nonce;
  script.src = url;
  const ended = new Promise((resolve) => { script.onload = script.onerror = resolve; });
  document.head.append(script);
  await ended;
  if (window.Plotly) return true;
  for (const plot of document.querySelectorAll(".plot")) {
    plot.textContent = `Not drawn: this page loads its figures' script from ${decodeURI(url)}, which is not there.`;
    plot.className = "empty";
    plot.removeAttribute("role");
    plot.removeAttribute("style");
  }
  for (const readout of document.querySelectorAll(".readout")) readout.hidden = true;
  return false;
};
