"use strict";
// What may be chosen on the page: theme, runs, metrics, smoothing, range. Charts are drawn when they are seen.
(() => {
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  const one = id => document.getElementById(id);
  const root = document.documentElement;
  let data = JSON.parse(one("data").textContent);
  const view = {smooth: 2, zoom: null, extent: null, hidden: new Set()};
  const drawn = new Map();  // by number of the chart

  // some browsers keep nothing for pages from a disk
  const kept = {
    get: () => { try { return localStorage.getItem("evenstep-theme"); } catch { return null; } },
    set: value => { try { localStorage.setItem("evenstep-theme", value); } catch { /* then it is asked for again */ } },
  };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
  const showTheme = () => {
    one("theme").textContent = isDark() ? "Light" : "Dark";
    one("theme").setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
  };
  if (["dark", "light"].includes(kept.get())) root.dataset.theme = kept.get();
  one("theme").hidden = false;
  showTheme();

  const figures = () => all("figure[data-chart]");
  const chartOf = figure => data.charts[Number(figure.dataset.chart)];

  // all charts have one horizontal range, so that what is above each other happened together
  const measure = () => {
    let least = Infinity, most = -Infinity;
    for (const chart of data.charts) for (const curve of chart.curves) {
      if (view.hidden.has(curve.run) || !curve.updates.length) continue;
      const ends = [curve.updates[0], curve.updates[curve.updates.length - 1]];
      for (const [x] of data.runs[curve.run].incidents) {
        ends[0] = Math.min(ends[0], x);
        ends[1] = Math.max(ends[1], x);
      }
      [least, most] = [Math.min(least, ends[0]), Math.max(most, ends[1])];
    }
    view.extent = least < most ? [least, most] : null;
  };

  const zoom = ends => {
    if (ends && view.extent) {
      ends = [Math.max(ends[0], view.extent[0]), Math.min(ends[1], view.extent[1])];
      if (!(ends[0] < ends[1]) || (ends[0] === view.extent[0] && ends[1] === view.extent[1])) ends = null;
    }
    view.zoom = ends;
    showRange();
    drawn.forEach(each => each?.plot.setData(each.plot.data));
  };

  const showRange = () => {
    if (!one("tools")) return;
    const [from, to] = view.zoom ?? view.extent ?? [null, null];
    const short = value => (value === null ? "" : Math.round(value));
    one("from").value = short(from);
    one("to").value = short(to);
    one("all").disabled = view.zoom === null;
  };

  const told = {zoom, read: words => { one("reading").textContent = words; }};

  const draw = figure => {
    const number = Number(figure.dataset.chart);
    drawn.get(number)?.plot.destroy();
    drawn.set(number, curves.draw(data, chartOf(figure), figure, view, told));
  };

  const drawAll = () => {
    measure();
    showRange();
    figures().filter(figure => drawn.has(Number(figure.dataset.chart))).forEach(draw);
  };

  const seen = new IntersectionObserver(entries => {
    for (const {isIntersecting, target} of entries) {
      if (!isIntersecting || drawn.has(Number(target.dataset.chart))) continue;
      draw(target);
    }
  }, {rootMargin: "300px"});
  addEventListener("beforeprint", () => {  // paper shows what has not been scrolled to as well
    figures().filter(figure => figure.offsetParent && !drawn.has(Number(figure.dataset.chart))).forEach(draw);
  });

  // words, all of which must be in the name
  const find = () => {
    const words = one("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = name => words.every(word => name.toLowerCase().includes(word));
    const named = figure => fits(`${figure.dataset.title} ${chartOf(figure).curves.map(curve => curve.label).join(" ")}`);
    figures().forEach(figure => { figure.hidden = !named(figure); });
    all(".group").forEach(group => {
      const some = all("figure[data-chart]", group).some(figure => !figure.hidden);
      group.hidden = !some;
      if (group.tagName === "DETAILS" && words.length && some) group.open = true;
    });
    all("tr[data-metric]").forEach(row => { row.hidden = !fits(row.dataset.metric); });
    const count = figures().filter(figure => !figure.hidden).length;
    one("none").hidden = !words.length;
    one("none").textContent = count ? `${count} of ${figures().length} charts` : "No metric has such a name.";
  };

  const bindTools = () => {
    if (!one("tools")) return;
    one("tools").hidden = false;
    one("tools").addEventListener("submit", event => event.preventDefault());
    one("find").addEventListener("input", find);
    one("smooth").addEventListener("input", event => {
      view.smooth = Number(event.target.value);
      one("width").textContent = view.smooth ? `${view.smooth} %` : "off";
      drawAll();
    });
    const range = () => {
      const ends = [one("from").valueAsNumber, one("to").valueAsNumber];
      if (ends.every(Number.isFinite) && ends[0] < ends[1]) zoom(ends); else showRange();
    };
    one("from").addEventListener("change", range);
    one("to").addEventListener("change", range);
    one("all").addEventListener("click", () => zoom(null));
  };

  const bindFigures = () => figures().forEach(figure => {
    figure.querySelector(".log")?.addEventListener("change", () => draw(figure));
    seen.observe(figure);
  });

  const bindRest = () => {
    all(".show").forEach(button => {
      button.hidden = false;
      button.addEventListener("click", () => {
        const place = Number(button.dataset.update);
        const width = view.extent ? (view.extent[1] - view.extent[0]) / 20 : 10;
        zoom([place - width, place + width]);
        one("curves").scrollIntoView({behavior: "smooth"});
      });
    });
    all("input.run").forEach(box => {
      box.checked = !view.hidden.has(Number(box.dataset.run));
      box.addEventListener("change", () => {
        if (box.checked) view.hidden.delete(Number(box.dataset.run)); else view.hidden.add(Number(box.dataset.run));
        drawAll();
      });
    });
  };

  one("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    kept.set(root.dataset.theme);
    showTheme();
    drawAll();
  });
  dark.addEventListener("change", () => { showTheme(); drawAll(); });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (width === innerWidth) return;  // a phone that hides its address bar
    width = innerWidth;
    drawn.forEach(each => each?.resize());
  });

  bindTools();
  measure();
  showRange();
  bindFigures();
  bindRest();

  // A page that follows a run asks for a newer one, and takes over what is new; what was chosen stays.
  const takeOver = text => {
    const fresh = new DOMParser().parseFromString(text, "text/html");
    const open = new Set(all("details.more").map((details, place) => (details.open ? place : -1)));
    const titles = inside => all("figure[data-chart]", inside).map(figure => figure.dataset.title).join("\n");
    const same = titles(document) === titles(fresh) && Boolean(one("tools")) === Boolean(fresh.getElementById("tools"));
    if (!same) {
      location.reload();
      return;
    }
    data = JSON.parse(fresh.getElementById("data").textContent);
    all("[data-fresh]").forEach(part => {
      const other = fresh.querySelector(`[data-fresh="${part.dataset.fresh}"]`);
      if (other) { part.className = other.className; part.innerHTML = other.innerHTML; }
    });
    all("details.more").forEach((details, place) => { details.open = open.has(place); });
    document.querySelector("footer").innerHTML = fresh.querySelector("footer").innerHTML;
    drawAll();
    bindRest();
    if (one("find")?.value) find();
  };

  if (data.live) {
    let known = null;
    const ask = async () => {
      try {
        const state = await (await fetch("state", {cache: "no-store"})).text();
        if (known !== null && state !== known) takeOver(await (await fetch("./", {cache: "no-store"})).text());
        known = state;
        document.body.dataset.seen = state;
        one("live").textContent = "live";
      } catch {
        one("live").textContent = "the server has stopped";
      }
      setTimeout(ask, 2000);
    };
    ask();
  }
})();
