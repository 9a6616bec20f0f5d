// Which view is shown, who is asked for its data, and with which key. The key lives in sessionStorage and nowhere else.

import { h } from "./dom.js";
import { moment } from "./format.js";
import { overviewFrame, showOverview } from "./overview.js";
import { requestView } from "./request.js";

const KEY = "promptsluice-key";
const EVERY_MS = 3000;
const MOST = 200; // requests that are listed at a time
const place = Object.fromEntries(
  ["view", "problem", "state", "who", "window", "live", "forget"].map((id) => [id, document.getElementById(id)]),
);

class Refused extends Error {}

async function ask(path) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const response = await fetch(`ui/api/${path}`, {
    headers,
    cache: "no-store",
    credentials: "omit",
    signal: AbortSignal.timeout(15_000),
  });
  if (response.ok) return response.json();
  const said = await response.json().catch(() => null);
  const message = said?.error?.message ?? `the gateway answered ${response.status}`;
  throw response.status === 401 ? new Refused(message) : new Error(message);
}

function problem(error) {
  const lost = error instanceof TypeError || error?.name === "TimeoutError";
  const text =
    error === null
      ? ""
      : lost
        ? "The gateway cannot be reached. Trying again\u2026"
        : `The gateway says: ${error.message}`;
  if (place.problem.textContent !== text) place.problem.textContent = text;
}

let view = null; // {name, frame} of what is shown
let asked = 0; // so often
let waiting = 0; // answers that have not come yet
let limit = 15;

/** Ask for what the address names, and show it. Of several at a time only the last one counts. */
async function refresh() {
  const mine = ++asked;
  waiting += 1;
  const id = /^#\/requests\/(\w+)$/.exec(location.hash)?.[1];
  try {
    if (id) await showRequest(id, mine);
    else await showAll(mine);
    if (mine === asked) problem(null);
  } catch (error) {
    if (mine !== asked) return;
    if (error instanceof Refused) return askForKey(error.message);
    problem(error);
    if (id && view?.name !== id) {
      view = null;
      place.view.replaceChildren(h("p", {}, h("a", { href: "#/" }, "\u2190 All requests")));
    }
  } finally {
    waiting -= 1;
  }
}

async function showAll(mine) {
  const [data, list] = await Promise.all([
    ask(`overview?window=${place.window.value}`),
    ask(`requests?limit=${limit}`),
  ]);
  if (mine !== asked) return;
  if (view?.name !== "all") {
    const frame = overviewFrame(() => {
      limit = MOST;
      refresh();
    });
    place.view.replaceChildren(...frame.nodes);
    if (view) place.view.focus({ preventScroll: true });
    view = { name: "all", frame };
  }
  status(data);
  showOverview(view.frame.places, data, list.requests);
  view.frame.button.hidden = limit === MOST || list.kept <= limit;
}

async function showRequest(id, mine) {
  if (view?.name === id) return;
  const one = await ask(`requests/${id}`);
  if (mine !== asked) return;
  place.view.replaceChildren(...requestView(one).filter(Boolean));
  view = { name: id };
  scrollTo(0, 0);
  place.view.querySelector("h1").focus({ preventScroll: true });
}

function status({ not_ready: reasons, viewer, started }) {
  const waiting = Object.entries(reasons)
    .map(([name, reason]) => `${name}: ${reason}`)
    .join("; ");
  place.state.textContent = waiting ? "not ready" : "ready";
  place.state.title = waiting || `since ${moment(started)}`;
  place.state.className = `chip ${waiting ? "warn" : "good"}`;
  place.who.textContent = viewer.key === null ? "" : `key ${viewer.key}`;
  place.forget.hidden = viewer.key === null;
}

function askForKey(why) {
  if (view?.name === "key" && !sessionStorage.getItem(KEY)) return;
  const wrong = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  view = { name: "key" };
  problem(null);
  place.state.textContent = place.who.textContent = "";
  place.forget.hidden = true;
  const input = h("input", {
    id: "key",
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
    "aria-describedby": "why",
  });
  const form = h(
    "form",
    { class: "card key-form" },
    h("h1", {}, "API key"),
    h(
      "p",
      { id: "why", class: wrong ? "problem" : "muted" },
      wrong
        ? `Not accepted: ${why}.`
        : "This gateway asks for a key. It stays in this tab until it is closed, and you see the requests of this key.",
    ),
    h("label", { for: "key" }, "Key"),
    input,
    h("button", { type: "submit" }, "Show"),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, input.value.trim());
    refresh();
  });
  place.view.replaceChildren(form);
  input.focus();
}

place.window.addEventListener("change", refresh);
place.forget.addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  view = null;
  refresh();
});
addEventListener("hashchange", refresh);
document.addEventListener("visibilitychange", () => document.hidden || refresh());
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  place.view.focus();
});
setInterval(() => {
  if (place.live.checked && !document.hidden && !waiting && view?.name !== "key") refresh();
}, EVERY_MS);
refresh();
