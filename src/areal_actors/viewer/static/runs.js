// The table of runs: which are shown, in which order, and which of them are one experiment with several seeds.

import {
  $,
  colorOf,
  describeRun,
  duration,
  h,
  moveTo,
  number,
  place,
  put,
  renew,
  select,
  state,
  table,
} from "./common.js";

const COLUMNS = [
  // title, value to sort by, text
  ["run", (run) => run.name],
  ["state", (run) => run.state ?? run.status, (run) => statusOf(run)],
  [
    "steps",
    (run) => run.steps,
    (run) => `${number(run.steps)}${run.total_steps ? ` / ${number(run.total_steps)}` : ""}`,
  ],
  ["reward", (run) => run.reward_last, (run) => number(run.reward_last)],
  ["held out", (run) => run.eval_last, (run) => number(run.eval_last)],
  ["settings", (run) => formatSettings(run), (run) => formatSettings(run)],
  [
    "age",
    (run) => -(run.changed_at ?? 0),
    (run) => (run.changed_at ? duration(Date.now() / 1000 - run.changed_at, true) : "–"),
  ],
];
let words = "",
  sorting = { column: 0, isDescending: false },
  differing = [];

export const statusOf = (run) => (run.is_live && run.status === "running" ? "live" : run.status);
export const isBad = (run) => ["failed", "killed"].includes(run.status) || Boolean(run.failure);

/** The settings in which the runs differ, without those that name them. */
export function findDifferences(runs) {
  runs = runs.filter((run) => Object.keys(run.settings ?? {}).length); // a visitor may not see those of a run
  const paths = new Set(runs.flatMap((run) => Object.keys(run.settings)));
  return [...paths].filter((path) => new Set(runs.map((run) => JSON.stringify(run.settings[path]))).size > 1).sort();
}

export const formatValue = (value) =>
  value === null || value === undefined
    ? "–"
    : typeof value === "object"
      ? JSON.stringify(value)
      : String(typeof value === "number" ? Number(value.toPrecision(8)) : value);
/** The last parts of a path, as many as tell it from the other paths: "size" may be of two datasets. */
const shortName = (path, paths) => {
  const parts = path.split(".");
  const lengths = parts.map((_, index) => index + 1);
  const isUnique = (length) => paths.every((other) => other === path || !endsWith(other, parts.slice(-length)));
  return parts.slice(-(lengths.find(isUnique) ?? parts.length)).join(".");
};
const endsWith = (path, parts) => `.${path}`.endsWith(`.${parts.join(".")}`);
/** A value without the directories of its files. */
const shortValue = (value) =>
  Array.isArray(value)
    ? `[${value.map(shortValue).join(", ")}]`
    : typeof value === "string"
      ? value.split("/").at(-1)
      : formatValue(value);
const formatSettings = (run, paths = differing) =>
  paths
    .filter((path) => path in (run.settings ?? {}))
    .map((path) => `${shortName(path, paths)}=${shortValue(run.settings[path])}`)
    .join(", ");

/** Runs that differ in nothing but the seed, by what they have in common. */
export function groupBySeed(names) {
  const groups = new Map();
  for (const name of names) {
    const run = describeRun(name) ?? { settings: {} };
    const rest = Object.entries(run.settings ?? {})
      .filter(([path]) => path !== "seed")
      .sort();
    const key = JSON.stringify([name.split("/").at(-2), rest]);
    groups.set(key, [...(groups.get(key) ?? []), name]);
  }
  return [...groups.values()].map((members) => {
    const settings = formatSettings(
      describeRun(members[0]) ?? {},
      differing.filter((path) => path !== "seed"),
    );
    const label = [members[0].split("/").at(-2), settings].filter(Boolean).join(" ");
    return { label: members.length > 1 ? `${label} (${members.length} runs)` : members[0], members };
  });
}

/** Compare names with the numbers in them: run2 is before run10, and lr0.0003 before lr0.001. */
function compareNames(a, b) {
  const parts = (name) =>
    name.split(/(\d+(?:\.\d+)?(?:e[-+]?\d+)?)/).map((part, index) => (index % 2 ? Number(part) : part));
  const left = parts(a),
    right = parts(b),
    at = left.findIndex((part, index) => part !== right[index]);
  if (at < 0 || right[at] === undefined) return left.length - right.length;
  return left[at] < right[at] ? -1 : 1;
}

function isWanted(run) {
  const text =
    `${run.name} ${run.state ?? ""} ${statusOf(run)} ${run.failure ?? ""} ${formatSettings(run)}`.toLowerCase();
  return words
    .toLowerCase()
    .split(/\s+/)
    .every((word) => text.includes(word));
}

let actions = { choose() {}, tick() {} };

/** Set what a click does: choose a run to look at, or tick runs to compare. */
export function connectRuns(found) {
  actions = found;
}

/** Draw the table. A host has more facts about a run: the state of its service, requests in flight and starts. */
export function drawRuns() {
  const section = $("runs");
  section.hidden = state.runs.length < 2 && !state.runs.some((run) => run.state);
  if (section.hidden) return;
  if (!$("run-list")) put(section, drawBar(), h("div", { id: "run-list" })); // what is being typed survives an update
  differing = findDifferences(state.runs);
  const shown = state.runs.filter(isWanted).sort(compareRuns);
  const tally = shown.length === state.runs.length ? "" : `${shown.length} of `;
  renew(
    $("run-list"),
    h("p", { class: "facts" }, `${tally}${state.runs.length} runs, ${state.ticked.size} shown`),
    shown.length
      ? table("Table of runs", drawTitles(), shown.map(drawRow), { id: "run-table" })
      : h("p", { class: "empty" }, "No run matches."),
  );
}

function drawBar() {
  const tickAll = (isTicked) => () =>
    actions.tick(
      state.runs.filter(isWanted).map((run) => run.name),
      isTicked,
    );
  const search = h("input", {
    type: "search",
    placeholder: "Filter by name, state, setting …",
    "aria-label": "filter runs",
    oninput: () => {
      words = search.value;
      drawRuns();
    },
  });
  const ways = [
    ["", "each run"],
    ["mean", "seeds as mean and range"],
  ];
  const seeds = select("how runs are drawn", place.seeds ?? "", ways, () => {
    moveTo({ seeds: seeds.value });
    actions.tick([], true);
  });
  const all = h("button", { type: "button", onclick: tickAll(true) }, "All");
  const none = h("button", { type: "button", onclick: tickAll(false) }, "None");
  return h("div", { class: "bar" }, search, all, none, seeds);
}

function compareRuns(a, b) {
  const { column, isDescending } = sorting;
  const [left, right] = [COLUMNS[column][1](a) ?? null, COLUMNS[column][1](b) ?? null];
  if (left === right || column === 0) return compareNames(a.name, b.name) * (isDescending && column === 0 ? -1 : 1);
  // What has no number is last in either direction.
  if (left === null) return 1;
  if (right === null) return -1;
  return (left < right ? -1 : 1) * (isDescending ? -1 : 1);
}

const classOf = (title) => `column-${title.replace(" ", "-")}`;

function drawTitles() {
  const { column, isDescending } = sorting;
  const order = isDescending ? "descending" : "ascending";
  const titles = COLUMNS.map(([title], index) => {
    const sort = () => {
      sorting = { column: index, isDescending: index === column && !isDescending };
      drawRuns();
    };
    const arrow = index !== column ? "" : isDescending ? " ↓" : " ↑";
    const button = h(
      "button",
      { type: "button", class: "plain", "data-key": `sort ${title}`, onclick: sort },
      title,
      arrow,
    );
    return h("th", { scope: "col", class: classOf(title), "aria-sort": index === column ? order : "none" }, button);
  });
  return [h("th", { scope: "col", class: "narrow" }, h("span", { class: "unseen" }, "shown")), ...titles];
}

function drawRow(run) {
  const box = h("input", {
    type: "checkbox",
    "aria-label": `show ${run.name}`,
    "data-key": `show ${run.name}`,
    onchange: () => actions.tick([run.name], box.checked),
  });
  box.checked = state.ticked.has(run.name);
  const cells = COLUMNS.map(([title, , text]) => {
    const drawn = title === "run" ? drawName(run) : title === "state" ? drawStatus(run) : text(run);
    return h("td", { class: classOf(title) }, drawn);
  });
  return h(
    "tr",
    { class: run.name === place.run ? "chosen" : null, title: run.failure ?? run.reason },
    h("td", { class: "narrow" }, box),
    cells,
  );
}

function drawName(run) {
  const swatch = h("span", { class: "swatch" });
  swatch.style.background = colorOf(run.name);
  const attributes = {
    type: "button",
    class: "plain name",
    "data-key": run.name,
    "aria-pressed": String(run.name === place.run),
    onclick: () => actions.choose(run.name),
  };
  return h("div", { class: "named" }, swatch, h("button", attributes, run.name));
}

function drawStatus(run) {
  const facts = [run.state, run.requests && `${run.requests} requests`, run.starts > 1 && `${run.starts} starts`];
  const style = isBad(run) ? "bad" : statusOf(run) === "live" ? "good" : null;
  return h("span", { class: style }, facts.filter(Boolean).join(", ") || statusOf(run));
}
