"use strict";
// Draws the charts of the page; what they show comes from the JSON beside this script.
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const figures = document.querySelectorAll(".charts figure");
  const cursors = uPlot.sync("updates");
  const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const spell = value => {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
    return Number(value.toPrecision(4)).toLocaleString("en", {maximumSignificantDigits: 4});
  };

  const axis = side => ({
    stroke: color("--soft"), font: "12px system-ui, sans-serif", labelSize: 0,
    grid: {stroke: color("--grid"), width: 1}, ticks: {stroke: color("--line"), width: 1, size: 4}, gap: 6, ...side,
  });

  // wide enough for the longest number beside it
  const axisSize = (plot, values) => {
    if (!values) return 30;
    const longest = values.reduce((most, value) => (value && value.length > most.length ? value : most), "");
    plot.ctx.font = plot.axes[1].font[0];
    return Math.ceil(plot.ctx.measureText(longest).width / devicePixelRatio) + 16;
  };

  // without a pointer in the chart, the legend tells the last value of each curve
  const tellLast = plot => {
    if (plot.cursor.idx != null) return;
    plot.data.forEach((values, index) => {
      let last = values.length - 1;
      while (last >= 0 && values[last] == null) last--;
      const cell = plot.root.querySelectorAll(".u-legend .u-series")[index]?.querySelector(".u-value");
      if (cell && last >= 0) cell.textContent = index === 0 ? values[last].toLocaleString("en") : spell(values[last]);
    });
  };

  const draw = (chart, figure, log) => {
    const positive = value => (log && value !== null && value <= 0 ? null : value);
    const tables = chart.curves.map(curve => [curve.updates, curve.values.map(positive)]);
    const holder = figure.querySelector(".plot");
    holder.replaceChildren();
    const series = chart.curves.map(curve => {
      const stroke = color(`--c${curve.color % 6}`);
      return {
        label: curve.label, width: curve.faint ? 1 : 2, stroke: curve.faint ? stroke + "4d" : stroke,
        points: {size: 5, fill: stroke}, value: (_, value) => spell(value),
      };
    });
    const height = () => (holder.clientWidth < 500 ? 220 : chart === charts[0] ? 340 : 260);
    const plot = new uPlot({
      width: holder.clientWidth, height: height(), series: [{label: "update", value: (_, x) => (x == null ? "–" : x.toLocaleString("en"))}, ...series],
      scales: {x: {time: false}, y: log ? {distr: 3} : {}},
      axes: [
        axis({size: 30, space: holder.clientWidth < 500 ? 56 : 72, values: (_, splits) => splits.map(x => (x % 1 ? "" : x.toLocaleString("en")))}),
        axis({size: axisSize, values: (_, splits) => splits.map(y => (y == null ? null : spell(y)))}),
      ],
      cursor: {y: false, sync: {key: cursors.key}, points: {size: 6}, drag: {x: true, y: false}},
      hooks: {setLegend: [tellLast]},
    }, uPlot.join(tables), holder);
    tellLast(plot);
    return {plot, resize: () => plot.setSize({width: holder.clientWidth, height: height()})};
  };

  const drawn = [];
  const drawAll = () => charts.forEach((chart, index) => {
    const log = figures[index].querySelector("input");
    if (drawn[index]) drawn[index].plot.destroy();
    drawn[index] = draw(chart, figures[index], log !== null && log.checked);
  });
  figures.forEach((figure, index) => {
    const log = figure.querySelector("input");
    if (log) log.addEventListener("change", () => {
      drawn[index].plot.destroy();
      drawn[index] = draw(charts[index], figure, log.checked);
    });
  });
  drawAll();
  addEventListener("resize", () => drawn.forEach(one => one.resize()));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
})();
