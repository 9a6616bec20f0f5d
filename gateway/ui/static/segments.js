// The segments of one prompt: what became of each, why, and its text where that is kept.

import { strip } from "./charts.js";
import { card, chip, empty, h, muted } from "./dom.js";
import { count, visible } from "./format.js";

const ARROW = " \u2192 ";
const FATES = ["kept", "pruned", "summarized", "retrieved", "reused"];
const SHOWN = 4000; // characters of a part before one has to ask for more

export function segments(one) {
  if (!one.segments)
    return card("Prompt", null, empty("No segments: a raw prompt, or a request that was refused before it was read."));
  const loaded = new Map();
  for (const span of one.report.kv_spans)
    if (span.segment !== null) loaded.set(span.segment, [...(loaded.get(span.segment) ?? []), span]);
  const list = one.segments.map((segment) => ({
    ...segment,
    loaded: loaded.get(segment.id) ?? [],
    chars: segment.parts.reduce((sum, part) => sum + part.chars, 0),
  }));
  const shown = (segment) => (segment.loaded.length ? "reused" : segment.fate);
  const used = new Map();
  for (const segment of list) used.set(shown(segment), (used.get(shown(segment)) ?? 0) + 1);
  const private_ =
    list.some((segment) => segment.parts.length) &&
    list.every((segment) => segment.parts.every((part) => part.text === null));
  return card(
    "Prompt by segments",
    `${count(list.length + one.left_out)} segments`,
    strip(
      "The prompt from end to end, by characters",
      list.flatMap((segment) => segment.parts.map((part) => stretch(segment, part))),
    ),
    h(
      "p",
      { class: "legend" },
      FATES.filter((fate) => used.has(fate)).map((fate) =>
        h("span", { class: "key" }, h("i", { class: fate }), `${fate} ${used.get(fate)}`),
      ),
    ),
    private_
      ? h(
          "p",
          { class: "muted" },
          "Texts are not kept. ",
          h("code", {}, "server: {records: {text: true}}"),
          " in the policy file turns that on.",
        )
      : null,
    h(
      "ol",
      { class: "segments" },
      list.map((segment) => segmentItem(segment, shown(segment))),
    ),
    one.left_out ? h("p", { class: "muted" }, `${count(one.left_out)} more segments are not told apart.`) : null,
  );
}

function stretch(segment, { fate, chars }) {
  const kind = segment.loaded.length && fate !== "pruned" ? "reused" : fate;
  return { kind, value: chars, title: `${segment.kind}: ${count(chars)} characters ${kind}` };
}

/** What retrieval puts around its documents: a line each, for there are many. */
const frames = (segment) => segment.kind === "other" && segment.fate === "retrieved" && segment.chars < 300;

function segmentItem(segment, fate) {
  if (frames(segment)) {
    const said = segment.parts
      .map((part) => part.text ?? "")
      .join("")
      .trim();
    return h(
      "li",
      { class: `segment frame ${fate}` },
      h(
        "p",
        { class: "head" },
        h("code", {}, visible(said) || "frame of a document"),
        h("span", { class: "grow" }),
        muted(segment.tokens ? `${count(segment.tokens[1])} tokens` : `${count(segment.chars)} characters`),
      ),
    );
  }
  const { tokens: sizes, parts } = segment;
  const size = sizes
    ? sizes[0] === sizes[1]
      ? `${count(sizes[0])} tokens`
      : `${count(sizes[0])}${ARROW}${count(sizes[1])} tokens`
    : `${count(segment.chars)} characters`;
  const about = [
    segment.role,
    segment.message >= 0 ? `message ${segment.message + 1}` : "tool",
    segment.source && `from ${segment.source}`,
  ];
  const kv = segment.loaded.length
    ? `KV of ${count(segment.loaded.reduce((sum, span) => sum + span.tokens, 0))} tokens from ${[...new Set(segment.loaded.map((span) => span.tier))].join(", ")}`
    : "";
  const why = [kv, segment.uses.length && `by ${segment.uses.join(", ")}`, segment.reason]
    .filter(Boolean)
    .join(" \u00b7 ");
  return h(
    "li",
    { class: `segment ${fate}` },
    h(
      "p",
      { class: "head" },
      chip(fate, fate),
      h("b", {}, segment.kind.replace("_", " ")),
      muted(visible(about.filter(Boolean).join(", "))),
      h("span", { class: "grow" }),
      h("span", { class: "number" }, size),
    ),
    why ? h("p", { class: "why" }, visible(why)) : null,
    body(parts),
  );
}

function body(parts) {
  if (parts.some((part) => part.text !== null))
    return h(
      "div",
      { class: "text", dir: "auto", tabindex: "0", role: "group", "aria-label": "Text" },
      parts.map(partText),
    );
  if (parts.length < 2) return null;
  const named = parts.map((part) => ({
    kind: part.fate,
    value: part.chars,
    title: `${part.fate}: ${count(part.chars)} characters`,
  }));
  return [
    strip(named.map((part) => part.title).join(", "), named),
    h("p", { class: "muted" }, named.map((part) => part.title).join(", ")),
  ];
}

function partText(part) {
  const text = part.text ?? "";
  const tag = { pruned: "del", summarized: "ins" }[part.fate] ?? "span";
  const element = h(tag, { class: part.fate, title: tag === "span" ? null : part.fate }, visible(text.slice(0, SHOWN)));
  const lost = part.chars - text.length;
  const note = lost > 0 ? h("span", { class: "cut" }, ` \u2026 ${count(lost)} more characters are not kept `) : null;
  if (text.length <= SHOWN) return [element, note];
  const more = h("button", { type: "button" }, `Show ${count(text.length - SHOWN)} more characters`);
  more.addEventListener("click", () => {
    element.append(visible(text.slice(SHOWN)));
    more.remove();
  });
  return [element, more, note];
}
