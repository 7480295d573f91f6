// What all parts of the page share: elements, numbers, requests, and the state that the address keeps.
// Texts of models and agents only ever become text nodes.

export const $ = (id) => document.getElementById(id);

const isShown = (child) => child !== null && child !== undefined && child !== false;

/** Create an element. Attributes that begin with "on" are listeners. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (isShown(value)) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(2).filter(isShown));
  return element;
}

export const put = (element, ...children) => element.replaceChildren(...children.flat(2).filter(isShown));

export const select = (label, value, options, onchange) =>
  h(
    "select",
    { "aria-label": label, onchange },
    options.map(([name, title]) => h("option", { value: name, selected: String(name) === String(value) }, title)),
  );

/** A table that scrolls sideways, and can be scrolled with the keyboard. Titles stand as the cells of the first row do. */
export const table = (label, titles, rows, attributes = {}) =>
  h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
    h(
      "table",
      attributes,
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          titles.map((title, index) =>
            title instanceof Node
              ? title
              : h(
                  "th",
                  { scope: "col", class: rows[0]?.children[index]?.classList.contains("number") ? "number" : null },
                  title,
                ),
          ),
        ),
      ),
      h("tbody", {}, rows),
    ),
  );

/** Format a number for people; nothing is a dash. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  // 0.00001234 would not fit beside an axis.
  if (Math.abs(value) < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return Math.abs(value) >= 1000
    ? Math.round(value).toLocaleString("en")
    : value
        .toPrecision(3)
        .replace(/(\.\d*?)0+$/, "$1")
        .replace(/\.$/, "");
}

export const signed = (value) => `${value > 0 ? "+" : value < 0 ? "-" : ""}${number(Math.abs(value))}`;
export const counted = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
export const words = (name) => (name ?? "").replaceAll("_", " ");

/** Format a duration with its largest two units, or with one. */
export function duration(seconds, isShort = false) {
  if (seconds === null || seconds === undefined) return "–";
  const units = [
    [86400, "d"],
    [3600, "h"],
    [60, "min"],
    [1, "s"],
  ];
  const first = units.findIndex(([size]) => seconds >= size);
  if (first < 0) return `${number(Math.round(seconds * 10) / 10)} s`;
  const [size, unit] = units[first],
    [next, nextUnit] = units[first + 1] ?? [];
  const whole = Math.floor(seconds / size),
    rest = next ? Math.floor((seconds - whole * size) / next) : 0;
  return `${whole} ${unit}${rest && whole < 10 && !isShort ? ` ${rest} ${nextUnit}` : ""}`;
}

export async function get(name, parameters = {}) {
  const pairs = Object.entries(parameters).flatMap(([key, value]) => [value].flat().map((one) => [key, one]));
  const answer = await fetch(
    `/api/${name}?${new URLSearchParams(pairs.filter(([, value]) => value !== undefined && value !== ""))}`,
  );
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error ?? `status ${answer.status}`);
  return found;
}

// ------------------------------------------------------------------------------------------------- state

export const state = { runs: [], summary: null, ticked: new Set(), isConnected: true };

/** What the address keeps: run, tab, ticked, axis, smoothing, log, kind, version, task, sample. */
export const place = { tab: "curves" };

export function readAddress() {
  const text = location.hash.slice(1);
  // A link to a run alone, as earlier versions wrote it.
  const found = text.includes("=")
    ? Object.fromEntries(new URLSearchParams(text))
    : text
      ? { run: decodeURIComponent(text) }
      : {};
  for (const name of Object.keys(place)) delete place[name];
  Object.assign(place, { tab: "curves" }, found);
}

/** Change what the address keeps. With isStep, the button "back" returns to what was shown before. */
export function moveTo(changes, isStep = false) {
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") delete place[name];
    else place[name] = String(value);
  }
  history[isStep ? "pushState" : "replaceState"](null, "", `#${new URLSearchParams(place)}`);
}

export const describeRun = (name) => state.runs.find((run) => run.name === name);

export const isDark = () =>
  (document.documentElement.dataset.theme ??
    (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

/** One colour for each run, everywhere: hues far apart for neighbours, and other lightness where hues come close. */
export function colorOf(name) {
  const index = Math.max(
    0,
    state.runs.findIndex((run) => run.name === name),
  );
  const lightness = (isDark() ? [0.72, 0.84, 0.6] : [0.55, 0.7, 0.42])[Math.floor(index / 14) % 3];
  return `oklch(${lightness} ${isDark() ? 0.14 : 0.16} ${((255 + index * 137.508) % 360).toFixed(1)})`;
}

/** Move the focus with the keys next and previous among elements of which one is a tab stop, and choose the one that gets it. */
export function roving(container, selector, { next, previous }) {
  container.addEventListener("keydown", (event) => {
    const all = [...container.querySelectorAll(selector)],
      at = all.indexOf(event.target.closest(selector));
    const goal =
      at < 0 ? undefined : all[{ Home: 0, End: all.length - 1, [next]: at + 1, [previous]: at - 1 }[event.key]];
    if (goal === undefined) return;
    event.preventDefault();
    goal.focus();
    goal.click();
  });
}

/** Replace the children of an element; the focus stays on the control with the same data-key, and the place in the list, too. */
export function renew(element, ...children) {
  const key = element.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const top = element.querySelector(".scroll")?.scrollTop ?? 0;
  put(element, children);
  const scroll = element.querySelector(".scroll");
  if (scroll) scroll.scrollTop = top;
  if (key) element.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
}
