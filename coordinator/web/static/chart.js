// A chart of lines over a common x axis, with what is under the pointer in words.

import { el, empty, rough, svg } from "./dom.js";

const LEFT = 52, RIGHT = 12, TOP = 8, BOTTOM = 24, HEAD = 24;
const SHOWN = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "stroke-opacity", "font-size", "font-weight", "font-family", "text-anchor"];

function ticks(low, high, most) {
  const raw = (high - low || Math.abs(high) || 1) / most, scale = 10 ** Math.floor(Math.log10(raw));
  const step = scale * [1, 2, 2.5, 5, 10].find((factor) => factor * scale >= raw * 0.999);
  const found = [];
  for (let at = Math.floor(low / step + 1e-9) * step; at < high + step * 0.999; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

// ``series``: [{points: [[x, y]], smooth: the same or null, kind, name}]; ``xText`` makes words of an x. ``zero``: y begins there;
// ``level``: a y at which there is a line across.
export function chart(title, series, width, height, xText, { zero = false, level = null } = {}) {
  const points = series.flatMap((one) => one.points);
  const words = el("span", { class: "readout" });
  const figure = el("figure", {}, el("figcaption", {}, el("b", {}, title),
    series.map((one) => el("span", {}, el("i", { class: one.kind }), one.name)), words));
  figure.style.width = `${width}px`;
  if (!points.length) {
    figure.append(empty("Nothing yet: the first step is still to come."));
    return figure;
  }
  const xs = points.map(([x]) => x), ys = [...points.map(([, y]) => y), ...(level === null ? [] : [level])];
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  const yTicks = ticks(zero ? Math.min(0, ...ys) : Math.min(...ys), Math.max(...ys), 5);
  const y0 = Math.min(zero ? 0 : Infinity, ...ys, ...yTicks), y1 = Math.max(...ys, ...yTicks);
  const across = (x) => LEFT + ((x - x0) / (x1 - x0 || 1)) * (width - LEFT - RIGHT);
  const up = (y) => height - BOTTOM - ((y - y0) / (y1 - y0 || 1)) * (height - TOP - BOTTOM);
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": describe(title, series, xText) });
  for (const y of yTicks) picture.append(
    svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: up(y), y2: up(y) }),
    svg("text", { class: "tick", x: LEFT - 6, y: up(y) + 4, "text-anchor": "end" }, small(y)));
  for (const x of ticks(x0, x1, Math.max(2, Math.floor(width / 110))).filter((tick) => tick >= x0 && tick <= x1)) {
    const text = xText(x), half = text.length * 3.1;
    picture.append(svg("text", { class: "tick", x: Math.min(Math.max(across(x), half), width - half), y: height - 6, "text-anchor": "middle" }, text));
  }
  if (level !== null) picture.append(svg("line", { class: "level", x1: LEFT, x2: width - RIGHT, y1: up(level), y2: up(level) }));
  const path = (all) => {
    let made = "", before = -Infinity;
    for (const [x, y] of all) { // training that went back begins a new line
      made += `${x > before && made ? "L" : "M"}${across(x).toFixed(1)} ${up(y).toFixed(1)}`;
      before = x;
    }
    return made;
  };
  for (const one of series) {
    picture.append(svg("path", { class: `line ${one.kind}${one.smooth ? " faint" : ""}`, d: path(one.points) }));
    if (one.smooth) picture.append(svg("path", { class: `line ${one.kind}`, d: path(one.smooth) }));
    if (one.points.length <= 40) picture.append(...one.points.map(([x, y]) => svg("circle", { class: one.kind, cx: across(x), cy: up(y), r: one.points.length === 1 ? 3 : 2 })));
  }
  const cross = svg("line", { class: "cross", y1: TOP, y2: height - BOTTOM, x1: -9, x2: -9 });
  const marks = series.map((one) => svg("circle", { class: `mark ${one.kind}`, r: 4, cx: -9, cy: -9 }));
  picture.append(cross, ...marks);
  picture.addEventListener("pointermove", (event) => {
    const x = x0 + ((event.offsetX - LEFT) / (width - LEFT - RIGHT)) * (x1 - x0);
    const near = series.map((one) => one.points.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best), one.points[0]));
    const first = near.find(Boolean);
    cross.setAttribute("x1", across(first[0]));
    cross.setAttribute("x2", across(first[0]));
    near.forEach((point, index) => {
      marks[index].setAttribute("cx", point ? across(point[0]) : -9);
      marks[index].setAttribute("cy", point ? up(point[1]) : -9);
    });
    words.textContent = [xText(first[0]), ...series.map((one, index) => (near[index] ? `${series.length > 1 ? `${one.name} ` : ""}${small(near[index][1])}` : ""))].filter(Boolean).join(" · ");
  });
  picture.addEventListener("pointerleave", () => {
    for (const one of [cross, ...marks]) for (const name of ["x1", "x2", "cx", "cy"]) if (one.hasAttribute(name)) one.setAttribute(name, -9);
    words.textContent = "";
  });
  figure.append(picture);
  return figure;
}

// Like ``rough``, and for numbers below a thousandth as a power of ten.
const small = (value) => (value && Math.abs(value) < 1e-3 ? value.toExponential(1).replace(".0", "") : rough(value));

function describe(title, series, xText) {
  const said = series.filter((one) => one.points.length).map(({ points, name }) =>
    `${name}: from ${small(points[0][1])} at ${xText(points[0][0])} to ${small(points.at(-1)[1])} at ${xText(points.at(-1)[0])}`);
  return `${title}. ${said.join("; ")}`;
}

// The charts one below the other, as an SVG file that looks the same without the page's style. Null: there are none yet.
export function pictureOf(figures) {
  const parts = [], drawn = figures.filter((figure) => figure.querySelector("svg"));
  if (!drawn.length) return null;
  let width = 0, top = 0;
  for (const figure of drawn) {
    const picture = figure.querySelector("svg"), copy = picture.cloneNode(true), originals = [...picture.querySelectorAll("*")];
    [...copy.querySelectorAll("*")].forEach((one, index) => {
      const style = getComputedStyle(originals[index]);
      for (const name of SHOWN) one.setAttribute(name, style.getPropertyValue(name));
      one.removeAttribute("class");
    });
    const { color, fontFamily } = getComputedStyle(figure), names = [...figure.querySelectorAll("figcaption span:not(.readout)")].map((one) => one.textContent).join(", ");
    parts.push(svg("text", { x: LEFT, y: top + 16, fill: color, "font-size": "13px", "font-family": fontFamily }, `${figure.querySelector("b").textContent}: ${names}`),
      svg("g", { transform: `translate(0 ${top + HEAD})` }, ...copy.childNodes));
    width = Math.max(width, Number(picture.getAttribute("width")));
    top += HEAD + Number(picture.getAttribute("height"));
  }
  const whole = svg("svg", { xmlns: "http://www.w3.org/2000/svg", width, height: top, viewBox: `0 0 ${width} ${top}` },
    svg("rect", { width, height: top, fill: getComputedStyle(drawn[0].closest("section")).backgroundColor }), ...parts);
  return new XMLSerializer().serializeToString(whole);
}
