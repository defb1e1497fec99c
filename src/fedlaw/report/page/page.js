"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const make = (name, attributes = {}, text) => {
    const svg = ["svg", "path", "line", "text", "rect", "circle", "g"].includes(name);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const number = (value) =>
    value === 0 ? "0" : Math.abs(value) < 0.01 ? value.toExponential(2) : String(+value.toPrecision(4));

  // ---------------------------------------------------------------- where a number comes from
  const dialog = document.getElementById("origin");
  const body = dialog.querySelector("div");
  const row = (table, cells, kind) => {
    const line = make("tr");
    for (const cell of cells) line.append(make(kind || "td", {}, cell));
    table.append(line);
  };
  const origin = (title, runs, values) => {
    body.replaceChildren(make("h3", {}, title));
    const table = make("table");
    row(table, ["run", "seed", "value", "status", "begun (UTC)"], "th");
    const kinds = new Set();
    for (const id of runs) {
      const run = data.runs[id] || {};
      const value = values && id in values ? number(values[id]) : "-";
      row(table, [id, run.seed ?? "-", value, run.status || "missing", (run.started || "-").slice(0, 16)]);
      kinds.add(JSON.stringify([run.description, run.versions, run.machine]));
    }
    const box = make("div", { class: "scroll" });
    box.append(table);
    body.append(box);
    for (const kind of kinds) {
      const [description, versions, machine] = JSON.parse(kind);
      if (versions === undefined || versions === null) continue;
      const say = (what) => Object.entries(what).filter(([, v]) => v !== null).map(([k, v]) => `${k} ${v}`).join(", ");
      body.append(make("p", { class: "files" }, `${say(data.versions[versions])}; ${say(data.machines[machine])}`));
      body.append(make("pre", {}, data.descriptions[description]));
    }
    dialog.showModal();
  };
  document.addEventListener("click", (event) => {
    const cell = event.target.closest("[data-cell]");
    if (cell) {
      const found = data.cells[+cell.dataset.cell];
      origin(found.title, found.runs, found.values);
    }
    if (event.target === dialog) dialog.close();
  });
  for (const box of document.querySelectorAll("input[data-paper]"))
    box.addEventListener("change", () => box.closest("section").classList.toggle("hide-paper", !box.checked));

  // ---------------------------------------------------------------- charts
  const tip = document.getElementById("tip");
  const W = 420, H = 270, L = 52, R = 10, T = 8, B = 40;
  const ticks = (low, high, log) => {
    if (log) {
      const out = [];
      for (let k = Math.ceil(low - 1e-9); k <= high + 1e-9; k++) out.push(k);
      return out.length > 1 ? out : [low, high];
    }
    const raw = (high - low) / 5 || 1, size = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * size).find((s) => s >= raw);
    const out = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) out.push(+v.toPrecision(10));
    return out;
  };
  const colour = (chart, line) =>
    chart.kind === "weights" ? (line.role === "malicious" ? "#D55E00" : "#0072B2") : data.colours[line.number % data.colours.length];

  const draw = (chart, panel, range, hidden) => {
    const X = (x) => L + (((chart.log ? Math.log10(x) : x) - range.x0) / (range.x1 - range.x0 || 1)) * (W - L - R);
    const Y = (y) => H - B - ((y - range.y0) / (range.y1 - range.y0 || 1)) * (H - T - B);
    const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${chart.title}: ${panel.title}` });
    const text = (x, y, words, more) => svg.append(make("text", { x, y, "font-size": 11, fill: "#5d6775", ...more }, words));
    for (const v of ticks(range.y0, range.y1)) {
      svg.append(make("line", { x1: L, x2: W - R, y1: Y(v), y2: Y(v), stroke: "#e6eaee" }));
      text(L - 6, Y(v) + 4, number(v), { "text-anchor": "end" });
    }
    for (const v of ticks(range.x0, range.x1, chart.log)) {
      const x = chart.log ? 10 ** v : v;
      text(X(x), H - B + 15, chart.log ? `1e${+v.toFixed(1)}` : number(v), { "text-anchor": "middle" });
    }
    text((L + W - R) / 2, H - 7, chart.x, { "text-anchor": "middle", "font-size": 12 });
    text(12, (T + H - B) / 2, chart.y, { "text-anchor": "middle", "font-size": 12, transform: `rotate(-90 12 ${(T + H - B) / 2})` });
    const shown = panel.lines.filter((line) => !hidden.has(line.key));
    for (const line of shown) {
      const stroke = colour(chart, line), at = line.x.map((x, i) => [X(x), Y(line.y[i])]);
      if (line.spread.some((s) => s > 0) && !line.published) {
        const within = (y) => Y(Math.max(range.y0, Math.min(range.y1, y)));
        const up = line.x.map((x, i) => `${X(x)},${within(line.y[i] + line.spread[i])}`);
        const down = line.x.map((x, i) => `${X(x)},${within(line.y[i] - line.spread[i])}`).reverse();
        svg.append(make("path", { d: `M${[...up, ...down].join("L")}Z`, fill: stroke, opacity: 0.12 }));
      }
      if (line.published) {
        for (const [x, y] of at) svg.append(make("path", { d: `M${x - 3},${y - 3}l6,6m0,-6l-6,6`, stroke, "stroke-width": 1.4 }));
        continue;
      }
      const dash = ["", "6 3", "2 2"][Math.floor((line.number || 0) / data.colours.length) % 3];
      svg.append(make("path", { d: `M${at.map((p) => p.join(",")).join("L")}`, fill: "none", stroke,
        "stroke-width": chart.kind === "weights" ? 1.2 : 1.9, "stroke-dasharray": dash, opacity: chart.kind === "weights" ? 0.8 : 1 }));
      if (at.length < 14) for (const [x, y] of at) svg.append(make("circle", { cx: x, cy: y, r: 2.4, fill: stroke }));
    }
    const mark = make("circle", { r: 4.5, fill: "none", stroke: "#1c2430", "stroke-width": 1.5, visibility: "hidden" });
    svg.append(mark);
    const near = (event) => {
      const box = svg.getBoundingClientRect();
      const px = ((event.clientX - box.left) / box.width) * W, py = ((event.clientY - box.top) / box.height) * H;
      let best = null;
      for (const line of shown)
        line.x.forEach((x, i) => {
          const d = (X(x) - px) ** 2 + (Y(line.y[i]) - py) ** 2;
          if (!best || d < best.d) best = { d, line, i };
        });
      return best && best.d < 1600 ? best : null;
    };
    svg.addEventListener("pointermove", (event) => {
      const best = near(event);
      mark.setAttribute("visibility", best ? "visible" : "hidden");
      tip.style.visibility = best ? "visible" : "hidden";
      if (!best) return;
      const { line, i } = best;
      mark.setAttribute("cx", X(line.x[i]));
      mark.setAttribute("cy", Y(line.y[i]));
      const spread = line.spread[i] ? ` ± ${number(line.spread[i])}` : "";
      tip.textContent = `${line.name}: ${number(line.y[i])}${spread} at ${chart.x} ${number(line.x[i])}`;
      tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 6))}px`;
      tip.style.top = `${event.clientY + 14}px`;
    });
    svg.addEventListener("pointerleave", () => {
      tip.style.visibility = mark.style.visibility = "hidden";
      mark.setAttribute("visibility", "hidden");
    });
    svg.addEventListener("click", (event) => {
      const best = near(event);
      if (best && best.line.runs.length) origin(`${panel.title} ${best.line.name}`, best.line.runs);
    });
    return svg;
  };

  const extent = (chart) => {
    let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
    for (const panel of chart.panels)
      for (const line of panel.lines)
        line.x.forEach((x, i) => {
          const at = chart.log ? Math.log10(x) : x, s = line.spread[i] || 0;
          x0 = Math.min(x0, at); x1 = Math.max(x1, at);
          y0 = Math.min(y0, line.y[i] - s); y1 = Math.max(y1, line.y[i] + s);
        });
    const percent = chart.y.endsWith("(%)");
    if (percent) { y0 = Math.max(0, y0); y1 = Math.min(100, y1); } else y0 = Math.min(0, Math.max(0, y0));
    const room = (y1 - y0) * 0.04 || 1;
    if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
    return { x0, x1, y0: percent ? Math.max(0, y0 - room) : y0, y1: y1 + room };
  };

  for (const holder of document.querySelectorAll("[data-chart]")) {
    const chart = data.charts[+holder.dataset.chart], hidden = new Set(), range = extent(chart);
    const keys = new Map();
    for (const panel of chart.panels)
      for (const line of panel.lines) {
        line.key = chart.kind === "weights" ? line.role : line.name;
        if (!keys.has(line.key)) keys.set(line.key, colour(chart, line));
      }
    const legend = make("ul", { class: "legend" }), grid = make("div", { class: "charts" });
    const redraw = () => {
      grid.replaceChildren(...chart.panels.map((panel) => {
        const frame = make("div");
        frame.append(make("h4", {}, panel.title), draw(chart, panel, range, hidden));
        return frame;
      }));
    };
    for (const [key, stroke] of keys) {
      const item = make("li"), button = make("button", { type: "button", "aria-pressed": "true" });
      const swatch = make("i");
      swatch.style.background = stroke;
      button.append(swatch, key);
      button.addEventListener("click", () => {
        hidden.has(key) ? hidden.delete(key) : hidden.add(key);
        button.setAttribute("aria-pressed", String(!hidden.has(key)));
        redraw();
      });
      item.append(button);
      legend.append(item);
    }
    redraw();
    holder.append(legend, grid);
  }
  const page = document.documentElement;
  page.dataset.charts = String(document.querySelectorAll(".charts svg").length);
  page.dataset.overflow = String(page.scrollWidth - page.clientWidth);
})();
