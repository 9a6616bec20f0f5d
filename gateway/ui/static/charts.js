// Small charts as SVG and as boxes. What they show also stands beside them as text or in their label.

import { h, s } from "./dom.js";

const HEIGHT = 100;

function framed(label, { top, from, to }, shapes) {
  const lines = [0, 50, 100].map((y) =>
    s("line", { class: "grid", x1: 0, x2: 100, y1: y, y2: y, "vector-effect": "non-scaling-stroke" }),
  );
  const chart = { viewBox: `0 0 100 ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label };
  return h(
    "figure",
    { class: "chart" },
    h("div", { class: "scale", "aria-hidden": "true" }, h("span", {}, top), h("span", {}, "0")),
    s("svg", chart, lines, shapes),
    h("figcaption", { "aria-hidden": "true" }, h("span", {}, from), h("span", {}, to)),
  );
}

/** Stacked bars. `slots` are {title, values}, `kinds` the class of each value, `most` the value at the top. */
export function bars(label, slots, kinds, most, axis) {
  const step = 100 / slots.length;
  const shapes = slots.map(({ title, values }, place) => {
    let y = HEIGHT;
    const stack = values.map((value, kind) => {
      const height = (HEIGHT * value) / most;
      y -= height;
      return (
        height > 0 && s("rect", { class: kinds[kind], x: place * step + 0.1 * step, width: 0.8 * step, y, height })
      );
    });
    return s(
      "g",
      {},
      s("title", {}, title),
      s("rect", { class: "touch", x: place * step, width: step, y: 0, height: HEIGHT }),
      stack,
    );
  });
  return framed(label, axis, shapes);
}

/** Lines that break where there is no value. `rows` are {kind, values}. */
export function lines(label, rows, most, axis, titles) {
  const count = rows[0].values.length;
  const x = (place) => ((place + 0.5) * 100) / count;
  const shapes = rows.map(({ kind, values }) => {
    let pen = "";
    const path = values.map((value, place) => {
      if (value === null) return (pen = "");
      const at = `${x(place)} ${HEIGHT * (1 - value / most)}`;
      const stroke = pen ? `L${at}` : `M${at}h0`;
      pen = "down";
      return stroke;
    });
    return s("path", { class: `line ${kind}`, d: path.join(""), "vector-effect": "non-scaling-stroke" });
  });
  const touched = titles.map((title, place) =>
    s(
      "g",
      {},
      s("title", {}, title),
      s("rect", { class: "touch", x: (place * 100) / count, width: 100 / count, y: 0, height: HEIGHT }),
    ),
  );
  return framed(label, axis, [shapes, touched]);
}

/** One bar of parts that follow each other. `parts` are {kind, value, title}; `whole` is the value at its end. */
export function strip(label, parts, whole) {
  const shown = parts.filter((part) => part.value > 0);
  const total = whole || shown.reduce((sum, part) => sum + part.value, 0) || 1;
  return h(
    "div",
    { class: "strip", role: "img", "aria-label": label },
    shown.map((part) => h("span", { class: part.kind, title: part.title, width: `${(100 * part.value) / total}%` })),
  );
}

/** Parts that lie where they lie in 0...whole; later ones cover earlier ones. `parts` are {kind, start, size, title}. */
export function places(label, parts, whole) {
  const chart = {
    class: "places",
    viewBox: `0 0 ${whole} 10`,
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": label,
  };
  return s(
    "svg",
    chart,
    parts.map(({ kind, start, size, title }) =>
      s("rect", { class: kind, x: start, width: size, y: 0, height: 10 }, title && s("title", {}, title)),
    ),
  );
}

/** A mean with its interval, and a bound, on a scale up to `most`. */
export function interval(label, { mean, low, high }, bound, most) {
  const x = (value) => Math.min(100, Math.max(0, (100 * value) / most));
  const line = (kind, x1, x2, y1, y2) =>
    s("line", { class: kind, x1, x2, y1, y2, "vector-effect": "non-scaling-stroke" });
  return s(
    "svg",
    { class: "interval", viewBox: "0 0 100 20", preserveAspectRatio: "none", role: "img", "aria-label": label },
    line("grid", 0, 100, 10, 10),
    low !== null && high !== null && line("range", x(low), x(high), 10, 10),
    bound !== null && line("bound", x(bound), x(bound), 1, 19),
    line("mean", x(mean), x(mean), 4, 16),
  );
}
