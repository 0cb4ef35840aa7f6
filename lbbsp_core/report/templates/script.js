"use strict";
(function () {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  function themed(layout) {
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--ink").trim();
    const line = style.getPropertyValue("--line").trim();
    const paper = style.getPropertyValue("--paper").trim();
    const copy = JSON.parse(JSON.stringify(layout));
    copy.font = {color: ink, size: 12, family: getComputedStyle(document.body).fontFamily};
    copy.paper_bgcolor = "rgba(0,0,0,0)";
    copy.plot_bgcolor = "rgba(0,0,0,0)";
    copy.hoverlabel = {bgcolor: paper, bordercolor: line, font: {color: ink}};
    for (const name of Object.keys(copy)) {
      if (/^[xy]axis/.test(name)) {
        copy[name] = Object.assign({gridcolor: line, zerolinecolor: line, linecolor: line},
                                   copy[name]);
      }
    }
    return copy;
  }
  const opened = [];
  function draw() {
    for (const chart of charts) {
      Plotly.react(chart.id, chart.data, themed(chart.layout),
                   {responsive: true, displaylogo: false, displayModeBar: false});
    }
  }
  // Charts have the size of the window in which they were drawn, and paper has another one.
  function print(isPrinted) {
    document.documentElement.classList.toggle("printed", isPrinted);
    if (isPrinted) {
      for (const each of document.querySelectorAll("details:not(.plot-table):not([open])")) {
        each.open = true;
        opened.push(each);
      }
    } else {
      while (opened.length) opened.pop().open = false;
    }
    draw();
    for (const chart of charts) Plotly.Plots.resize(chart.id);
  }
  draw();
  dark.addEventListener("change", draw);
  window.addEventListener("beforeprint", function () { print(true); });
  window.addEventListener("afterprint", function () { print(false); });
})();
