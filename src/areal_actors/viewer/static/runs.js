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
const shortName = (path) => path.split(".").at(-1);
const formatSettings = (run, paths = differing) =>
  paths
    .filter((path) => path in (run.settings ?? {}))
    .map((path) => `${shortName(path)}=${formatValue(run.settings[path]).split("/").at(-1)}`)
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

/** Draw the table. A service has more facts about a run: its state, requests in flight and starts. */
export function drawRuns({ choose, tick }) {
  const section = $("runs"),
    isHost = state.runs.some((run) => run.state);
  section.hidden = state.runs.length < 2 && !isHost;
  if (section.hidden) return;
  differing = findDifferences(state.runs);
  const shown = state.runs.filter(isWanted),
    { column, isDescending } = sorting,
    key = COLUMNS[column][1];
  shown.sort((a, b) => {
    const [left, right] = [key(a), key(b)];
    if (left === right || (left ?? null) === (right ?? null)) return compareNames(a.name, b.name);
    if (left === null || left === undefined) return 1; // what has no number is last either way
    if (right === null || right === undefined) return -1;
    if (column === 0) return compareNames(a.name, b.name) * (isDescending ? -1 : 1);
    return (left < right ? -1 : 1) * (isDescending ? -1 : 1);
  });
  const titles = [
    h("th", { scope: "col", class: "narrow" }, h("span", { class: "unseen" }, "shown")),
    ...COLUMNS.map(([title], index) =>
      h(
        "th",
        {
          scope: "col",
          class: `column-${title.replace(" ", "-")}`,
          "aria-sort": index === column ? (isDescending ? "descending" : "ascending") : "none",
        },
        h(
          "button",
          {
            type: "button",
            class: "plain",
            "data-key": `sort ${title}`,
            onclick: () => {
              sorting = { column: index, isDescending: index === column && !isDescending };
              drawRuns({ choose, tick });
            },
          },
          title,
          index === column ? (isDescending ? " ↓" : " ↑") : "",
        ),
      ),
    ),
  ];
  const rows = shown.map((run) => {
    const box = h("input", {
      type: "checkbox",
      "aria-label": `show ${run.name}`,
      "data-key": `show ${run.name}`,
      onchange: (event) => tick([run.name], event.target.checked),
    });
    box.checked = state.ticked.has(run.name);
    const swatch = h("span", { class: "swatch" });
    swatch.style.background = colorOf(run.name);
    const facts = [run.state, run.requests && `${run.requests} requests`, run.starts > 1 && `${run.starts} starts`]
      .filter(Boolean)
      .join(", ");
    return h(
      "tr",
      { class: run.name === place.run ? "chosen" : null, title: run.failure ?? run.reason ?? null },
      h("td", { class: "narrow" }, box),
      COLUMNS.map(([title, , text], index) =>
        h(
          "td",
          { class: `column-${title.replace(" ", "-")} ${index > 1 && index !== 5 ? "number" : ""}` },
          index === 0
            ? [
                swatch,
                h(
                  "button",
                  {
                    type: "button",
                    class: "plain name",
                    "data-key": run.name,
                    "aria-pressed": String(run.name === place.run),
                    onclick: () => choose(run.name),
                  },
                  run.name,
                ),
              ]
            : index === 1
              ? h("span", { class: isBad(run) ? "bad" : statusOf(run) === "live" ? "good" : null }, facts || text(run))
              : text(run),
        ),
      ),
    );
  });
  const tally = h(
    "span",
    { class: "facts", id: "num-runs" },
    `${shown.length === state.runs.length ? "" : `${shown.length} of `}${state.runs.length} runs, ${state.ticked.size} shown`,
  );
  const body = [
    tally,
    shown.length
      ? table("Table of runs", titles, rows, { id: "run-table" })
      : h("p", { class: "empty" }, "No run matches."),
  ];
  if (!$("run-search")) {
    // made once: what is being typed survives the arrival of a step
    put(
      section,
      h(
        "div",
        { class: "bar" },
        h("input", {
          id: "run-search",
          type: "search",
          placeholder: "Filter by name, state, setting …",
          "aria-label": "filter runs",
          oninput: (event) => {
            words = event.target.value;
            drawRuns({ choose, tick });
          },
        }),
        h(
          "button",
          {
            type: "button",
            onclick: () =>
              tick(
                state.runs.filter(isWanted).map((run) => run.name),
                true,
              ),
          },
          "All",
        ),
        h(
          "button",
          {
            type: "button",
            onclick: () =>
              tick(
                state.runs.filter(isWanted).map((run) => run.name),
                false,
              ),
          },
          "None",
        ),
        select(
          "how runs are drawn",
          place.seeds ?? "",
          [
            ["", "each run"],
            ["mean", "seeds as mean and range"],
          ],
          (event) => {
            moveTo({ seeds: event.target.value });
            tick([], true);
          },
        ),
      ),
      h("div", { id: "run-list" }),
    );
  }
  renew($("run-list"), body);
}
