"use strict";
(function () {
  const LIGHT = { ink: "#1b2430", grid: "#e4e8ee", axis: "#aab3c0", hover: "#ffffff" };
  const DARK = { ink: "#e7ebf0", grid: "#323b47", axis: "#5d6877", hover: "#12161c" };
  const CONFIG = { responsive: true, displayModeBar: false };
  const darkPage = window.matchMedia("(prefers-color-scheme: dark)");

  function axis(colours, own) {
    return Object.assign(
      { gridcolor: colours.grid, linecolor: colours.axis, zeroline: false, automargin: true },
      own,
      own && own.title ? { title: { text: own.title, standoff: 8 } } : {}
    );
  }

  function layoutOf(figure, colours) {
    return Object.assign({}, figure.layout, {
      height: figure.height,
      font: { family: "system-ui, sans-serif", size: 13, color: colours.ink },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 10, r: 26, t: 8, b: 8 },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal" },
      hoverlabel: { bgcolor: colours.hover, font: { color: colours.ink } },
      hovermode: "closest",
      showlegend: true,
      xaxis: axis(colours, figure.layout.xaxis),
      yaxis: axis(colours, figure.layout.yaxis)
    });
  }

  function drawAll(colours) {
    for (const place of document.querySelectorAll(".plot")) {
      const figure = JSON.parse(document.getElementById(place.dataset.figure).textContent);
      Plotly.react(place, figure.data, layoutOf(figure, colours), CONFIG);
    }
  }

  function drawForScreen() {
    drawAll(darkPage.matches ? DARK : LIGHT);
  }

  // Paper is white whatever the screen is.
  window.addEventListener("beforeprint", function () { drawAll(LIGHT); });
  window.addEventListener("afterprint", drawForScreen);
  darkPage.addEventListener("change", drawForScreen);
  drawForScreen();
})();
