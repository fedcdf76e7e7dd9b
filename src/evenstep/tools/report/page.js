"use strict";
// Choices on the page: runs, metrics, smoothing, zoom, order of runs. Charts are drawn when they are scrolled to.
(() => {
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  const one = id => document.getElementById(id);
  let data = JSON.parse(one("data").textContent);
  const view = {smooth: 2, zoom: null, extent: null, hidden: new Set()};
  const drawn = new Map();  // by number of the chart

  // all charts share one horizontal range
  const measure = () => {
    const shown = data.charts.flatMap(chart => chart.curves).filter(curve => !view.hidden.has(curve.run) && curve.updates.length);
    const ends = shown.flatMap(curve => [curve.updates[0], curve.updates.at(-1), ...data.runs[curve.run].incidents.map(([x]) => x)]);
    const [least, most] = ends.reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]);
    view.extent = least < most ? [least, most] : null;
  };

  const zoom = ends => {
    view.zoom = ends && [Math.max(ends[0], view.extent[0]), Math.min(ends[1], view.extent[1])];
    one("all").disabled = view.zoom === null;
    drawn.forEach(each => each?.plot.setData(each.plot.data));
  };

  const draw = figure => {
    const number = Number(figure.dataset.chart);
    drawn.get(number)?.plot.destroy();
    drawn.set(number, curves.draw(data, data.charts[number], figure, view, zoom));
  };
  const figures = () => all("figure[data-chart]");
  const drawAll = () => {
    measure();
    figures().filter(figure => drawn.has(Number(figure.dataset.chart))).forEach(draw);
  };
  const drawNew = figure => { if (!drawn.has(Number(figure.dataset.chart))) draw(figure); };
  const seen = new IntersectionObserver(entries => {
    entries.filter(entry => entry.isIntersecting).forEach(entry => drawNew(entry.target));
  }, {rootMargin: "300px"});

  // words, all of which must be in the name
  const find = () => {
    const words = one("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = name => words.every(word => name.toLowerCase().includes(word));
    figures().forEach(figure => {
      const labels = data.charts[Number(figure.dataset.chart)].curves.map(curve => curve.label);
      figure.hidden = !fits(`${figure.dataset.title} ${labels.join(" ")}`);
    });
    all(".group").forEach(group => {
      group.hidden = all("figure", group).every(figure => figure.hidden);
      if (words.length && !group.hidden) group.open = true;
    });
    all("tr[data-metric]").forEach(row => { row.hidden = !fits(row.dataset.metric); });
  };

  // a click on a heading sorts the runs, another one turns the order round
  const sortBy = heading => {
    const place = heading.cellIndex, rows = all("tbody tr", heading.closest("table"));
    const text = row => row.cells[place].textContent.trim().replaceAll(",", "");
    const down = heading.ariaSort === "ascending" ? -1 : 1;
    all("th", heading.parentNode).forEach(other => { other.ariaSort = null; });
    heading.ariaSort = down === 1 ? "ascending" : "descending";
    const compare = (a, b) => (parseFloat(a) - parseFloat(b)) || a.localeCompare(b, "en", {numeric: true});
    rows.sort((a, b) => down * compare(text(a), text(b))).forEach(row => row.parentNode.append(row));
  };

  const bindRuns = () => {
    all(".sortable thead th").forEach(heading => heading.addEventListener("click", () => sortBy(heading)));
    all("input.run").forEach(box => {
      box.checked = !view.hidden.has(Number(box.dataset.run));
      box.addEventListener("change", () => {
        view.hidden[box.checked ? "delete" : "add"](Number(box.dataset.run));
        drawAll();
      });
    });
  };

  measure();
  bindRuns();
  figures().forEach(figure => {
    figure.querySelector(".log")?.addEventListener("change", () => draw(figure));
    seen.observe(figure);
  });
  if (one("tools")) {
    one("tools").hidden = false;
    one("tools").addEventListener("submit", event => event.preventDefault());
    one("find").addEventListener("input", find);
    one("all").addEventListener("click", () => zoom(null));
    one("smooth").addEventListener("input", event => {
      view.smooth = Number(event.target.value);
      one("width").textContent = view.smooth ? `${view.smooth} %` : "off";
      drawAll();
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (width !== innerWidth) drawn.forEach(each => each?.resize());  // a phone's address bar changes the height only
    width = innerWidth;
  });

  // A page that follows a run takes over what is new every two seconds; what was chosen stays.
  const takeOver = fresh => {
    const titles = page => all("figure[data-chart]", page).map(figure => figure.dataset.title).join("\n");
    if (titles(document) !== titles(fresh)) return location.reload();
    data = JSON.parse(fresh.getElementById("data").textContent);
    const open = all("details.more").map(details => details.open);
    all("[data-fresh]").forEach(part => {
      part.innerHTML = fresh.querySelector(`[data-fresh="${part.dataset.fresh}"]`).innerHTML;
    });
    all("details.more").forEach((details, place) => { details.open = open[place] ?? false; });
    drawAll();
    bindRuns();
    if (one("find")?.value) find();
  };
  let known = null;
  const ask = async () => {
    try {
      const state = await (await fetch("state", {cache: "no-store"})).text();
      if (known !== null && state !== known) {
        takeOver(new DOMParser().parseFromString(await (await fetch("./", {cache: "no-store"})).text(), "text/html"));
      }
      known = document.body.dataset.seen = state;
    } catch {
      one("live").textContent = "the server has stopped";
    }
    setTimeout(ask, 2000);
  };
  if (data.live) ask();
})();
