// Problems with the rewards of their samples; one sample at a time, its siblings one key away.

import {
  $,
  counted,
  get,
  h,
  moveTo,
  number,
  place,
  put,
  renew,
  roving,
  select,
  signed,
  state,
  table,
  words,
} from "./common.js";
import { drawMessage, drawSession } from "./tokens.js";

const TRAITS = [
  ["", "any rewards"],
  ["different", "different rewards"],
  ["equal", "equal rewards"],
  ["failed", "with failures"],
  ["untrained", "with untrained turns"],
];
const PURPOSES = [
  ["rollout", "training"],
  ["eval-rollout", "evaluation"],
];
const MAX_SQUARES = 32;
let listed = [],
  opened = null,
  newest = 0;

/** Draw the list, and the group and sample that the address names. An update leaves what is being read. */
export async function showConversations(isUpdate) {
  const { versions } = state.summary;
  const kind = place.kind ?? (versions.rollout.length || !versions["eval-rollout"].length ? "rollout" : "eval-rollout");
  if (!isUpdate || !$("group-list")) {
    const columns = h("div", { class: "split" }, h("div", { id: "group-list" }), h("div", { id: "group" }));
    put($("view"), drawBar(kind), columns);
  }
  listVersions(kind, versions[kind]);
  const { query, trait, low, high, source } = place;
  const found = await get("groups", { run: place.run, kind, version: place.at, query, trait, low, high, source });
  listed = found.groups;
  drawList(kind, found.is_cut);
  const isChosen = place.task !== undefined;
  if (isUpdate && isChosen && $("group").childElementCount) return;
  const first = listed.find((group) => group.has_tokens) ?? listed[0];
  if (isChosen) await openGroup({ kind, version: place.version, task: place.task }, place.sample);
  else if (first) await openGroup({ kind, ...first }, undefined);
  else {
    const isFiltered = query || trait || low || high || source;
    const nothing = "No episode has ended yet, or rollout.dump_to_file is off.";
    put($("group"), h("p", { class: "empty" }, isFiltered ? "No group matches." : nothing));
  }
}

function drawBar(kind) {
  const filter = (name) => (event) => {
    moveTo({ [name]: event.target.value });
    showConversations(true);
  };
  const input = (name, label, attributes) =>
    h("input", { "aria-label": label, value: place[name], onchange: filter(name), ...attributes });
  const bound = { type: "number", step: "any" };
  const changeKind = (event) => {
    moveTo({ kind: event.target.value, version: null, task: null, sample: null, at: null });
    showConversations();
  };
  const { sources } = state.summary;
  const named = [["", "all sources"], ...sources.map((name) => [name, name])];
  return h(
    "div",
    { class: "bar" },
    select("purpose", kind, PURPOSES, changeKind),
    h("select", { id: "versions", "aria-label": "version", onchange: filter("at") }),
    input("query", "search conversations", { type: "search", placeholder: "Search in problems and texts …" }),
    select("rewards", place.trait ?? "", TRAITS, filter("trait")),
    h(
      "span",
      { class: "range" },
      h("span", { class: "facts" }, "mean"),
      input("low", "lowest mean reward", { ...bound, placeholder: "from" }),
      input("high", "highest mean reward", { ...bound, placeholder: "to" }),
    ),
    sources.length > 0 && select("source", place.source ?? "", named, filter("source")),
  );
}

function listVersions(kind, versions) {
  const begun = (version) => (kind === "rollout" ? `, begun in step ${version + 1}` : "");
  const named = versions.toReversed().map((version) => [version, `version ${version}${begun(version)}`]);
  const options = [["", "all versions"], ...named].map(([value, title]) =>
    h("option", { value, selected: String(value) === (place.at ?? "") }, title),
  );
  put($("versions"), options);
}

const isOpen = (group) => group.task === place.task && String(group.version) === place.version;
const keyOf = (group) => `${group.version}/${group.task}`;

function drawList(kind, isCut) {
  const values = listed.flatMap((group) => group.rewards),
    low = Math.min(0, ...values),
    high = Math.max(...values, low + 1e-9);
  const level = (reward) => Math.round(((reward - low) / (high - low)) * 4);
  const first = h("th", { scope: "col", class: "version-column" }, "version");
  const rows = listed.map((group) => drawGroupRow(kind, group, level));
  const found = table("Problems", [first, "problem", "rewards", "mean"], rows);
  if (!found.querySelector('button[tabindex="0"]')) found.querySelector("button.problem")?.setAttribute("tabindex", 0);
  roving(found, "button.problem", { next: "ArrowDown", previous: "ArrowUp" });
  found.addEventListener("keydown", (event) => openSibling({ ArrowRight: 1, ArrowLeft: -1 }[event.key] ?? 0));
  const tally = `${counted(listed.length, "problem")}${isCut ? ", the newest; narrow the search for others" : ""}.`;
  const hint = " A square is an episode: the fuller, the higher its reward.";
  renew($("group-list"), h("p", { class: "facts", id: "num-groups" }, tally, hint), listed.length > 0 && found);
}

function drawGroupRow(kind, group, level) {
  const isEqual = group.rewards.length > 1 && new Set(group.rewards).size === 1;
  const squares = group.rewards
    .slice(0, MAX_SQUARES)
    .map((reward) => h("i", { class: `r${level(reward)}`, title: number(reward) }));
  const attributes = {
    type: "button",
    class: "plain name problem",
    "data-key": keyOf(group),
    tabindex: isOpen(group) ? 0 : -1,
  };
  return h(
    "tr",
    { class: isOpen(group) ? "pick chosen" : "pick", onclick: () => openGroup({ kind, ...group }, undefined, true) },
    h("td", { class: "number version-column" }, number(group.version)),
    h("td", {}, h("button", attributes, group.problem || `problem ${group.task}`)),
    h(
      "td",
      {},
      h("span", { class: "rewards" }, squares),
      h("div", { class: "facts" }, group.task, isEqual && " · no signal"),
    ),
    h("td", { class: "number" }, number(group.mean)),
  );
}

// ------------------------------------------------------------------------------------------------- group

async function openGroup({ kind, version, task }, sample, isStep = false) {
  moveTo({ kind, version, task, sample }, isStep);
  for (const row of $("group-list").querySelectorAll("tr.pick")) {
    const button = row.querySelector("button"),
      isChosen = button.dataset.key === keyOf({ version, task });
    row.classList.toggle("chosen", isChosen);
    button.tabIndex = isChosen ? 0 : -1;
  }
  const request = ++newest; // what is asked for later is shown, whichever comes first
  try {
    const found = await get("group", { run: place.run, kind, version, task });
    if (request !== newest) return;
    opened = found;
  } catch (error) {
    return put($("group"), h("p", { class: "bad" }, error.message));
  }
  const { episodes } = opened;
  // Samples with the same text are one: the first of them stands for the others.
  const distinct = episodes.filter((episode) => episode.same_as === null);
  const wanted =
    distinct.find((episode) => String(episode.sample) === place.sample) ??
    distinct.find((episode) => episode.session !== null) ??
    distinct[0];
  const strip = h(
    "div",
    { class: "siblings", role: "group", "aria-label": "samples of this problem; left and right arrow keys" },
    distinct.map((episode) => {
      const count = episodes.filter((other) => other.same_as === episode.sample).length + 1;
      return h(
        "button",
        {
          type: "button",
          class: `sibling ${directionOf(episode.above_mean)}`,
          "data-sample": episode.sample,
          onclick: () => openSample(episode, true),
        },
        h("b", {}, number(episode.reward)),
        count > 1 ? ` ×${count}` : "",
        episode.failure && " failed",
      );
    }),
  );
  put(
    $("group"),
    h("h2", {}, opened.problem || `Problem ${task}`),
    h(
      "p",
      { class: "facts" },
      `problem ${task} · version ${version} · ${counted(episodes.length, "sample")}, mean reward ${number(opened.mean)}`,
      distinct.length < episodes.length && ` · ${counted(distinct.length, "different answer")}`,
    ),
    strip,
    h("div", { id: "sample" }),
  );
  roving(strip, "button", { next: "ArrowRight", previous: "ArrowLeft" });
  if (wanted) await openSample(wanted, false);
}

/** Open the sample next to the one that is shown. */
function openSibling(step) {
  const siblings = [...$("group").querySelectorAll(".sibling")];
  const at = siblings.findIndex((button) => button.getAttribute("aria-pressed") === "true");
  if (step && at >= 0) siblings[at + step]?.click();
}

const directionOf = (value) => (value > 1e-9 ? "up" : value < -1e-9 ? "down" : "");

async function openSample(episode, isChosen) {
  if (isChosen) moveTo({ sample: episode.sample });
  for (const button of $("group").querySelectorAll(".sibling")) {
    const isShown = button.dataset.sample === String(episode.sample);
    button.setAttribute("aria-pressed", String(isShown));
    button.tabIndex = isShown ? 0 : -1;
  }
  const verdict = `Sample ${episode.sample} earned ${number(episode.reward)}${
    opened.episodes.length > 1
      ? `, ${
          Math.abs(episode.above_mean) < 1e-9
            ? "the mean of its group"
            : `${number(Math.abs(episode.above_mean))} ${episode.above_mean > 0 ? "above" : "below"} the mean of its group`
        }`
      : ""
  }.`;
  const head = [
    h("p", { class: "verdict" }, verdict),
    episode.untrained && h("p", { class: "why" }, `No step trained it: ${words(episode.untrained)}.`),
  ];
  if (episode.session === null) return put($("sample"), head, drawRows(episode));
  const request = ++newest,
    session = await get("session", { run: place.run, index: episode.session });
  if (request === newest) put($("sample"), head, drawSession(session, state.summary));
}

/** The texts of a sample whose tokens were not kept. */
function drawRows(episode) {
  return [
    h("p", { class: "facts" }, "Tokens are kept of some conversations; of this one, there is the text."),
    episode.rows.map((row) =>
      h(
        "div",
        { class: "turn" },
        h(
          "p",
          { class: "facts" },
          `${counted(row.trained_tokens, "trained token")} · version ${row.head_version}${row.tail_version === row.head_version ? "" : `–${row.tail_version}`} · return ${signed(row.reward ?? 0)}`,
        ),
        h(
          "details",
          {},
          h("summary", {}, "what the model read, with system text and tools"),
          h("pre", {}, row.prompt ?? ""),
        ),
        drawMessage({ role: "assistant", content: row.completion ?? "" }, "answer"),
      ),
    ),
  ];
}
