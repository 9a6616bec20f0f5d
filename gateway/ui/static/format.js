// Numbers, times and foreign text for people. Pure functions; the document is not touched.

const MINUS = "\u2212";
const NONE = "\u2013";

const known = (value) => typeof value === "number" && Number.isFinite(value);
const signed = (value, format) => (value < 0 ? MINUS : "") + format(Math.abs(value));
const three = (value) =>
  value >= 100 ? String(Math.round(value)) : value.toLocaleString("en", { maximumSignificantDigits: 3 });

function scaled(value, units, step) {
  let place = 0;
  while (place < units.length - 1 && Number(value.toPrecision(3)) >= step) {
    value /= step;
    place += 1;
  }
  return three(value) + units[place];
}

/** 1234 as "1,234", 45678 as "45.7k". */
export function count(value) {
  if (!known(value)) return NONE;
  const whole = (n) => (n < 10_000 ? Math.round(n).toLocaleString("en") : scaled(n, ["", "k", "M", "G", "T"], 1000));
  return signed(value, whole);
}

/** Bytes in binary units: "1.5 MiB". */
export function bytes(value) {
  return known(value) ? signed(value, (n) => scaled(n, [" B", " KiB", " MiB", " GiB", " TiB"], 1024)) : NONE;
}

/** Milliseconds as "0.42 ms", "123 ms", "4.56 s", "3 min 20 s" or "2 h 5 min". */
export function duration(ms) {
  if (!known(ms)) return NONE;
  return signed(ms, (n) => {
    if (n < 999.5) return `${n < 0.005 ? "0" : three(n)} ms`;
    if (n < 59_950) return `${three(n / 1000)} s`;
    const seconds = Math.round(n / 1000);
    if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
    return `${count(Math.floor(seconds / 3600))} h ${Math.floor((seconds % 3600) / 60)} min`;
  });
}

/** A share as a percentage; what is not nothing is never shown as 0 %, nor what is not all as 100 %. */
export function percent(share) {
  if (!known(share)) return NONE;
  return signed(share, (n) => {
    if (n > 0 && n < 0.001) return "<0.1%";
    if (n > 0.999 && n < 1) return ">99.9%";
    return `${(100 * n).toLocaleString("en", { maximumFractionDigits: n < 0.0995 ? 1 : 0 })}%`;
  });
}

/** A part of a whole; nothing of nothing is not known. */
export const share = (part, whole) => (whole > 0 ? part / whole : null);

/** Seconds since the epoch as the time of day here. */
export const clock = (at, seconds = true) =>
  new Date(1000 * at).toLocaleTimeString("en-GB", seconds ? {} : { hour: "2-digit", minute: "2-digit" });

/** The same with its day. */
export const moment = (at) => `${new Date(1000 * at).toLocaleDateString("en-CA")} ${clock(at)}`;

/** The least of 1, 2, 2.5 and 5 times a power of ten that is not below the value. */
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 2.5, 5, 10].find((step) => step * power >= value * (1 - 1e-9));
}

/**
 * Text with what cannot be seen made visible: control characters, and marks that reorder, join or hide text.
 * Line breaks and tabs stay.
 */
export function visible(text) {
  const unseen =
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;
  return text.replace(/\r\n/g, "\n").replace(unseen, (character) => {
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
}
