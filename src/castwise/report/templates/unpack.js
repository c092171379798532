// Unpacks what a page holds as base64 of gzip: its figures, and the library that draws them.
"use strict";
const unpacked = async (id) => {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (each) => each.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
};
const loadPlotly = async () => {
  const script = document.createElement("script");
  script.textContent = await unpacked("plotly");
  document.head.append(script);
};
