"use strict";
// Draws charts: what they show comes from the page's data, how they show it from `view` (smoothing, zoom, runs).
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

  const spellUpdate = x => (x == null ? "–" : x >= 1e6 ? spell(x) : Math.round(x).toLocaleString("en"));

  // The mean of all values within half a window of each point. Near the begin as far before as after, so that a steep
  // fall is not flattened; near the end there is only less after.
  const smoothed = (curve, percent) => {
    const points = curve.updates.map((update, index) => [update, curve.values[index]]).filter(point => point[1] !== null);
    if (points.length < 3) return null;
    const first = points[0][0], last = points[points.length - 1][0], half = (last - first) * percent / 200;
    if (points.filter(point => point[0] <= first + 2 * half).length < 3) return null;
    const every = Math.ceil(points.length / 500), updates = [], values = [];
    let begin = 0;
    for (let index = 0; index < points.length; index++) {
      if (index % every && index !== points.length - 1) continue;
      const here = points[index][0], reach = Math.min(half, here - first);
      while (points[begin][0] < here - reach) begin++;
      let total = 0, count = 0;
      for (let next = begin; next < points.length && points[next][0] <= here + reach; next++) {
        total += points[next][1];
        count++;
      }
      updates.push(here);
      values.push(total / count);
    }
    return {updates, values};
  };

  const lineAxis = side => ({
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
  const tellLast = tell => plot => {
    if (plot.cursor.idx != null) return;
    plot.data.forEach((values, index) => {
      let last = values.length - 1;
      while (last >= 0 && values[last] == null) last--;
      const cell = plot.root.querySelectorAll(".u-legend .u-series")[index]?.querySelector(".u-value");
      if (cell && last >= 0) cell.textContent = index === 0 ? spellUpdate(values[last]) : tell(values[last]);
    });
  };

  // incidents as marks on the axis: a line through the chart and a triangle on its foot
  const marks = incidents => plot => {
    const {ctx, bbox} = plot;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = color("--bad");
    ctx.lineWidth = devicePixelRatio;
    for (const [x] of incidents) {
      const place = Math.round(plot.valToPos(x, "x", true));
      if (place < bbox.left || place > bbox.left + bbox.width) continue;
      const foot = bbox.top + bbox.height, size = 4 * devicePixelRatio;
      ctx.globalAlpha = 0.35;
      ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath(); ctx.moveTo(place, bbox.top); ctx.lineTo(place, foot); ctx.stroke();
      ctx.globalAlpha = 1;
      ctx.beginPath(); ctx.moveTo(place - size, foot); ctx.lineTo(place + size, foot); ctx.lineTo(place, foot - 1.6 * size); ctx.fill();
    }
    ctx.restore();
  };

  // uPlot itself gives a curve that is all 0 an axis up to 100
  const rangeOf = (least, most) => (least == null ? [null, null] : least === 0 && most === 0 ? [0, 1] : uPlot.rangeNum(least, most, 0.1, true));
  const heightOf = (holder, large) => (holder.clientWidth < 500 ? 220 : large ? 340 : 250);

  // One chart. `view`: smooth (percent), zoom ([from, to] or null), hidden (numbers of runs); `told`: what to call
  // when it is zoomed (with a range, or null) or read (with a sentence).
  const draw = (data, chart, figure, view, told) => {
    const holder = figure.querySelector(".plot"), log = figure.querySelector(".log")?.checked ?? false;
    const tellValue = chart.title.endsWith("_bytes") ? spellBytes : spell;
    const positive = value => (log && value !== null && value <= 0 ? null : value);
    const tables = [], series = [], owners = [];
    const shown = chart.curves.filter(curve => !view.hidden.has(curve.run));
    const add = (curve, points, faint, words) => {
      const stroke = color(`--c${curve.color}`);
      tables.push([points.updates, points.values.map(positive)]);
      series.push({
        label: curve.label + words, width: faint ? 1 : 2, stroke: faint ? stroke + "55" : stroke,
        dash: curve.dash ? [[8, 4], [3, 3], [8, 3, 2, 3]][(curve.dash - 1) % 3] : undefined,
        points: {size: 5, fill: stroke, ...(faint ? {show: false} : points.values.length <= 20 ? {show: true} : {})}, value: (_, value) => tellValue(value),
      });
      owners.push(curve);
    };
    const means = [];
    for (const curve of shown) {
      const mean = view.smooth > 0 && curve.values.length >= 20 ? smoothed(curve, view.smooth) : null;
      add(curve, curve, mean !== null, "");
      if (mean) means.push([curve, mean]);
    }
    for (const [curve, mean] of means) add(curve, mean, false, ", smoothed");
    const said = figure.querySelector(".said");
    const tell = words => { said.textContent = words; said.hidden = !words; };
    tell("");
    holder.replaceChildren();
    if (!tables.length) {
      tell("Nothing is chosen to be shown here.");
      return null;
    }
    const incidents = data.runs.flatMap((run, number) => {
      if (view.hidden.has(number) || !chart.curves.some(curve => curve.run === number)) return [];
      return run.incidents;
    });
    const nearest = plot => {
      const {left} = plot.cursor;
      const close = left == null || left < 0 ? [] : incidents.filter(([x]) => Math.abs(plot.valToPos(x, "x") - left) < 8);
      tell(close.length ? close.slice(0, 3).map(([update, words]) => `update ${update.toLocaleString("en")}, ${words}`).join(" · ") : "");
    };
    const narrow = holder.clientWidth < 500;
    const plot = new uPlot({
      width: holder.clientWidth, height: heightOf(holder, chart === data.charts[0]),
      series: [{label: "update", value: (_, x) => spellUpdate(x)}, ...series],
      scales: {
        x: {time: false, range: (_, least, most) => view.zoom ?? view.extent ?? [least, most]},
        y: log ? {distr: 3} : {range: (_, least, most) => rangeOf(least, most)},
      },
      axes: [
        lineAxis({size: 30, space: narrow ? 62 : 76, values: (_, splits) => splits.map(x => (x % 1 ? "" : spellUpdate(x)))}),
        lineAxis({size: axisSize, values: (_, splits) => splits.map(y => (y == null ? null : tellValue(y)))}),
      ],
      cursor: {
        y: false, sync: {key: cursors.key, setSeries: false}, points: {size: 6}, drag: {x: true, y: false, setScale: false},
        bind: {dblclick: () => () => { told.zoom(null); return null; }},
      },
      hooks: {
        setLegend: [tellLast(tellValue)], setCursor: [nearest], draw: [marks(incidents)],
        setSelect: [self => {
          if (self.select.width < 4 || self.cursor.event == null) return;
          const ends = [self.posToVal(self.select.left, "x"), self.posToVal(self.select.left + self.select.width, "x")];
          self.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
          told.zoom(ends);
        }],
        setSeries: [(self, index, given) => {  // a curve and its mean come and go together
          if (index == null || given.show == null) return;
          self.series.forEach((one, other) => {
            if (other && other !== index && owners[other - 1] === owners[index - 1] && one.show !== given.show) self.setSeries(other, {show: given.show});
          });
        }],
      },
    }, uPlot.join(tables), holder);
    const rows = holder.querySelectorAll(".u-legend .u-series");
    owners.forEach((curve, index) => { if (owners.lastIndexOf(curve) > index) rows[index + 1].hidden = true; });
    tellLast(tellValue)(plot);
    nearest(plot);
    holder.onkeydown = event => {
      const [from, to] = [plot.scales.x.min, plot.scales.x.max], xs = plot.data[0];
      const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
      if (step) {
        const inside = xs.map((x, index) => index).filter(index => xs[index] >= from && xs[index] <= to);
        const now = inside.indexOf(plot.cursor.idx);
        const next = inside[now < 0 ? (step < 0 ? inside.length - 1 : 0) : Math.min(inside.length - 1, Math.max(0, now + step))];
        plot.setCursor({left: plot.valToPos(xs[next], "x"), top: 10});
        const values = plot.series.slice(1).map((one, index) => [one.label, plot.data[index + 1][next]]).filter(one => one[1] != null);
        told.read(`${chart.title}, update ${spellUpdate(xs[next])}: ${values.map(([label, value]) => `${label} ${tellValue(value)}`).join(", ")}`);
      } else if ("+=".includes(event.key)) {
        const middle = plot.cursor.idx == null ? (from + to) / 2 : xs[plot.cursor.idx];
        told.zoom([Math.max(from, middle - (to - from) / 4), Math.min(to, middle + (to - from) / 4)]);
      } else if (event.key === "-") {
        told.zoom([from - (to - from) / 2, to + (to - from) / 2]);
      } else if (event.key === "0" || event.key === "Escape") {
        told.zoom(null);
      } else {
        return;
      }
      event.preventDefault();
    };
    return {
      plot,
      resize: () => plot.setSize({width: holder.clientWidth, height: heightOf(holder, chart === data.charts[0])}),
    };
  };

  return {draw};
})();
