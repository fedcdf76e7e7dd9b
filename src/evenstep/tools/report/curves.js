"use strict";
// Draws one chart: its content comes from the page's data, its look from `view` (smoothing, zoom, hidden runs).
const curves = (() => {
  const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const cursors = uPlot.sync("curves");

  const spell = value => {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
    return Number(value.toPrecision(4)).toLocaleString("en", {maximumSignificantDigits: 4});
  };
  const spellBytes = value => {
    if (value == null) return "–";
    const power = Math.max(0, Math.min(5, Math.floor(Math.log10(Math.abs(value) || 1) / 3)));
    return `${Number((value / 1000 ** power).toPrecision(4))} ${["B", "kB", "MB", "GB", "TB", "PB"][power]}`;
  };
  const spellUpdate = x => (x == null ? "–" : Math.round(x).toLocaleString("en"));

  // Mean of the values within half a window of each point; near the begin as far before as after, so that a steep fall
  // is not flattened.
  const smoothed = (curve, percent) => {
    const points = curve.updates.map((update, index) => [update, curve.values[index]]).filter(point => point[1] !== null);
    if (points.length < 20 || percent === 0) return null;
    const first = points[0][0], half = (points[points.length - 1][0] - first) * percent / 200;
    const sums = [0];
    for (const [, value] of points) sums.push(sums[sums.length - 1] + value);
    let begin = 0, end = 0;
    const values = points.map(([here]) => {
      const reach = Math.min(half, here - first);
      while (points[begin][0] < here - reach) begin++;
      while (end < points.length && points[end][0] <= here + reach) end++;
      return (sums[end] - sums[begin]) / (end - begin);
    });
    return {updates: points.map(point => point[0]), values};
  };

  // without a pointer in the chart, the legend has the last value of each curve
  const showLast = tell => plot => {
    if (plot.cursor.idx != null) return;
    const cells = plot.root.querySelectorAll(".u-legend .u-value");
    plot.data.forEach((values, index) => {
      const last = values.findLast(value => value != null);
      if (cells[index] && last != null) cells[index].textContent = index === 0 ? spellUpdate(last) : tell(last);
    });
  };

  // incidents as triangles on the axis
  const marks = incidents => ({ctx, bbox}, valToPos) => {
    ctx.save();
    ctx.fillStyle = color("--bad");
    const foot = bbox.top + bbox.height, size = 5 * devicePixelRatio;
    for (const [x] of incidents) {
      const place = valToPos(x);
      if (place < bbox.left || place > bbox.left + bbox.width) continue;
      ctx.beginPath(); ctx.moveTo(place - size, foot); ctx.lineTo(place + size, foot); ctx.lineTo(place, foot - 1.6 * size); ctx.fill();
    }
    ctx.restore();
  };

  const axis = side => ({stroke: color("--soft"), font: "12px system-ui, sans-serif", grid: {stroke: color("--grid"), width: 1},
    ticks: {stroke: color("--line"), width: 1, size: 4}, gap: 6, ...side});
  const widest = (plot, values) => {
    plot.ctx.font = plot.axes[1].font[0];
    return Math.ceil(Math.max(0, ...(values ?? []).map(text => plot.ctx.measureText(text ?? "").width)) / devicePixelRatio) + 16;
  };
  const heightOf = (holder, large) => (holder.clientWidth < 500 ? 220 : large ? 340 : 250);

  // `zoom` is called with a range, or null, when the chart is zoomed.
  const draw = (data, chart, figure, view, zoom) => {
    const holder = figure.querySelector(".plot"), said = figure.querySelector(".said");
    const log = figure.querySelector(".log")?.checked ?? false, large = chart === data.charts[0];
    const tell = chart.title.endsWith("_bytes") ? spellBytes : spell;
    const tables = [], series = [];
    const add = (curve, points, faint, words) => {
      const stroke = color(`--c${curve.color}`);
      tables.push([points.updates, points.values.map(value => (log && value <= 0 ? null : value))]);
      series.push({label: curve.label + words, width: faint ? 1 : 2, stroke: faint ? stroke + "55" : stroke, value: (_, value) => tell(value),
        dash: curve.dash ? [[8, 4], [3, 3], [8, 3, 2, 3]][(curve.dash - 1) % 3] : undefined,
        points: faint ? {show: false} : {size: 5, fill: stroke, ...(points.values.length <= 20 ? {show: true} : {})}});
    };
    const shown = chart.curves.filter(curve => !view.hidden.has(curve.run));
    const means = shown.map(curve => smoothed(curve, view.smooth));
    shown.forEach((curve, index) => add(curve, curve, means[index] !== null, ""));
    shown.forEach((curve, index) => { if (means[index]) add(curve, means[index], false, ", smoothed"); });
    const say = words => { said.textContent = words; said.hidden = !words; };
    holder.replaceChildren();
    say(tables.length ? "" : "Nothing is chosen to be shown here.");
    if (!tables.length) return null;
    const incidents = data.runs.flatMap((run, number) => (shown.some(curve => curve.run === number) ? run.incidents : []));
    const mark = marks(incidents);
    const nearest = plot => {
      const left = plot.cursor.left ?? -1;
      const close = left < 0 ? [] : incidents.filter(([x]) => Math.abs(plot.valToPos(x, "x") - left) < 8).slice(0, 3);
      say(close.map(([update, words]) => `update ${update.toLocaleString("en")}, ${words}`).join(" · "));
    };
    const plot = new uPlot({
      width: holder.clientWidth, height: heightOf(holder, large),
      series: [{label: "update", value: (_, x) => spellUpdate(x)}, ...series],
      scales: {
        x: {time: false, range: (_, least, most) => view.zoom ?? view.extent ?? [least, most]},
        y: log ? {distr: 3} : {range: (_, least, most) => (least === 0 && most === 0 ? [0, 1] : least == null ? [null, null] : uPlot.rangeNum(least, most, 0.1, true))},
      },
      axes: [axis({size: 30, space: 70, values: (_, splits) => splits.map(x => (x % 1 ? "" : spellUpdate(x)))}),
        axis({size: widest, values: (_, splits) => splits.map(y => (y == null ? null : tell(y)))})],
      cursor: {y: false, sync: {key: cursors.key, setSeries: false}, points: {size: 6}, drag: {x: true, y: false, setScale: false},
        bind: {dblclick: () => () => { zoom(null); return null; }}},
      hooks: {
        setLegend: [showLast(tell)], setCursor: [nearest], draw: [self => mark(self, x => Math.round(self.valToPos(x, "x", true)))],
        setSelect: [self => {
          if (self.select.width < 4 || self.cursor.event == null) return;
          const ends = [self.select.left, self.select.left + self.select.width].map(place => self.posToVal(place, "x"));
          self.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
          zoom(ends);
        }],
      },
    }, uPlot.join(tables), holder);
    const rows = holder.querySelectorAll(".u-legend .u-series");
    means.forEach((mean, index) => { if (mean) rows[index + 1].hidden = true; });  // the mean stands for its curve
    showLast(tell)(plot);
    return {plot, resize: () => plot.setSize({width: holder.clientWidth, height: heightOf(holder, large)})};
  };

  return {draw};
})();
