// A chart of lines over a common x axis, with what is under the pointer in words.

import { el, empty, rough, svg } from "./dom.js";

const LEFT = 46, RIGHT = 12, TOP = 8, BOTTOM = 24;

function ticks(low, high, most) {
  const raw = (high - low || Math.abs(high) || 1) / most, scale = 10 ** Math.floor(Math.log10(raw));
  const step = scale * [1, 2, 2.5, 5, 10].find((factor) => factor * scale >= raw * 0.999);
  const found = [];
  for (let at = Math.floor(low / step + 1e-9) * step; at < high + step * 0.999; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

// ``series``: [{points: [[x, y]], kind, name}]; ``xText`` makes words of an x.
export function chart(title, series, width, height, xText, zero = false) {
  const points = series.flatMap((one) => one.points);
  const words = el("span", { class: "readout" });
  const figure = el("figure", {}, el("figcaption", {}, el("b", {}, title),
    series.map((one) => el("span", {}, el("i", { class: one.kind }), one.name)), words));
  if (!points.length) {
    figure.append(empty("Nothing yet: the first step is still to come."));
    return figure;
  }
  const xs = points.map(([x]) => x), ys = points.map(([, y]) => y);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  const yTicks = ticks(zero ? 0 : Math.min(...ys), Math.max(...ys), 5);
  const y0 = Math.min(zero ? 0 : Infinity, ...ys, ...yTicks), y1 = Math.max(...ys, ...yTicks);
  const across = (x) => LEFT + ((x - x0) / (x1 - x0 || 1)) * (width - LEFT - RIGHT);
  const up = (y) => height - BOTTOM - ((y - y0) / (y1 - y0 || 1)) * (height - TOP - BOTTOM);
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": describe(title, series, xText) });
  for (const y of yTicks) picture.append(
    svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: up(y), y2: up(y) }),
    svg("text", { class: "tick", x: LEFT - 6, y: up(y) + 4, "text-anchor": "end" }, rough(y)));
  for (const x of ticks(x0, x1, Math.max(2, Math.floor(width / 110))).filter((tick) => tick >= x0 && tick <= x1)) picture.append(
    svg("text", { class: "tick", x: Math.min(Math.max(across(x), LEFT), width - RIGHT - 8), y: height - 6, "text-anchor": "middle" }, xText(x)));
  for (const one of series) {
    let path = "", before = -Infinity;
    for (const [x, y] of one.points) { // training that went back begins a new line
      path += `${x > before && path ? "L" : "M"}${across(x).toFixed(1)} ${up(y).toFixed(1)}`;
      before = x;
    }
    picture.append(svg("path", { class: `line ${one.kind}`, d: path }));
    if (one.points.length <= 40) picture.append(...one.points.map(([x, y]) => svg("circle", { class: one.kind, cx: across(x), cy: up(y), r: one.points.length === 1 ? 3 : 2 })));
  }
  const cross = svg("line", { class: "cross", y1: TOP, y2: height - BOTTOM, x1: -9, x2: -9 });
  picture.append(cross);
  picture.addEventListener("pointermove", (event) => {
    const x = x0 + ((event.offsetX - LEFT) / (width - LEFT - RIGHT)) * (x1 - x0);
    const near = series.map((one) => one.points.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best), one.points[0]));
    if (!near[0]) return;
    cross.setAttribute("x1", across(near[0][0]));
    cross.setAttribute("x2", across(near[0][0]));
    words.textContent = [xText(near[0][0]), ...series.map((one, index) => (near[index] ? `${one.name} ${rough(near[index][1])}` : ""))].filter(Boolean).join(" · ");
  });
  picture.addEventListener("pointerleave", () => { cross.setAttribute("x1", -9); cross.setAttribute("x2", -9); words.textContent = ""; });
  figure.append(picture);
  return figure;
}

function describe(title, series, xText) {
  const said = series.filter((one) => one.points.length).map(({ points, name }) =>
    `${name}: from ${rough(points[0][1])} at ${xText(points[0][0])} to ${rough(points.at(-1)[1])} at ${xText(points.at(-1)[0])}`);
  return `${title}. ${said.join("; ")}`;
}
