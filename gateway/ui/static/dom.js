// Elements from plain calls. Text only ever becomes text nodes: nothing here parses markup.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "width" && element instanceof HTMLElement) element.style.width = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

/** An HTML element; `width` is a CSS width. */
export const h = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);

/** An SVG element. */
export const s = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, tag), attributes, children);

const painted = new WeakMap();

/** Fill a place anew if its data has changed; whoever had the focus in it has it again. */
export function paint(place, data, build) {
  const now = JSON.stringify(data);
  if (painted.get(place) === now) return;
  painted.set(place, now);
  const focused = place.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  place.replaceChildren(...[build(data)].flat(Infinity));
  if (focused) place.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

/**
 * A table; cells are nodes or texts, columns are {title, number}. On phones a row becomes a block of its own; the roles
 * are named because such styles take them away.
 */
export function table(label, columns, rows) {
  const kind = (column) => (column.number ? "number" : null);
  return h(
    "table",
    { role: "table", "aria-label": label },
    h(
      "thead",
      { role: "rowgroup" },
      h(
        "tr",
        { role: "row" },
        columns.map((column) => h("th", { role: "columnheader", scope: "col", class: kind(column) }, column.title)),
      ),
    ),
    h(
      "tbody",
      { role: "rowgroup" },
      rows.map((cells) =>
        h(
          "tr",
          { role: "row" },
          cells.map((cell, at) => {
            const attributes = { "data-title": columns[at].title, class: kind(columns[at]) };
            return at
              ? h("td", { role: "cell", ...attributes }, cell)
              : h("th", { role: "rowheader", scope: "row", ...attributes }, cell);
          }),
        ),
      ),
    ),
  );
}

export const chip = (text, kind = "") => h("span", { class: `chip ${kind}` }, text);
export const muted = (...children) => h("span", { class: "muted" }, children);
export const empty = (...children) => h("p", { class: "empty" }, children);

/** A card with a heading; `more` stands beside it. */
export const card = (title, more, ...children) =>
  h("section", { class: "card" }, h("header", {}, h("h2", {}, title), more && muted(more)), children);
