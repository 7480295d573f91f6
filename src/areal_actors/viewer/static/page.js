// The page of runs: starts it, draws its head, changes between views, and follows what happens in the runs.
// Plain modules, no build step.

import {
  $,
  describeRun,
  duration,
  get,
  h,
  isDark,
  moveTo,
  number,
  place,
  put,
  readAddress,
  roving,
  state,
} from "./common.js";
import { showConversations } from "./conversations.js";
import { resizeCurves, showCurves } from "./curves.js";
import { showFailures, showService, showSettings, showSystem } from "./panels.js";
import { connectRuns, drawRuns, isBad, statusOf } from "./runs.js";

const TABS = {
  // title, how it is drawn, and the parts of a run that change it
  curves: ["Curves", showCurves, ["metrics"]],
  conversations: ["Conversations", showConversations, ["groups", "evaluations", "sessions", "advantages"]],
  service: ["Service", showService, ["served"]],
  failures: ["Failures", showFailures, ["failures"]],
  system: ["System", showSystem, ["metrics"]],
  settings: ["Settings", showSettings, []],
};

/** Show a run, ticked and with the views that it has. */
async function choose(run, isStep = true) {
  if (state.ticked.size === 1 && place.run !== undefined) state.ticked.clear(); // one after the other is no comparison
  state.ticked.add(run);
  const of = { version: null, task: null, sample: null, at: null, kind: null };
  moveTo(place.run === run ? {} : place.run === undefined ? { run } : { ...of, run }, isStep);
  await refresh();
  await show(place.tab);
}

/** Tick or untick runs; what is compared changes at once. */
async function tick(runs, isTicked) {
  for (const run of runs)
    if (isTicked) state.ticked.add(run);
    else state.ticked.delete(run);
  moveTo({ ticked: [...state.ticked].filter((run) => run !== place.run || state.ticked.size > 1).join("|") });
  drawRuns();
  await show(["curves", "settings"].includes(place.tab) ? place.tab : "curves");
}

async function refresh() {
  state.summary = await get("run", { run: place.run });
  // Of the table only this row is read again; a host's facts of it stay.
  const known = describeRun(place.run);
  if (known) Object.assign(known, state.summary);
  drawHead();
}

async function show(tab, isUpdate = false) {
  const isMoved = tab !== place.tab;
  if (isMoved) moveTo({ tab }, true);
  for (const button of $("tabs").children) {
    const isSelected = button.id === `tab-${tab}`;
    button.setAttribute("aria-selected", String(isSelected));
    button.tabIndex = isSelected ? 0 : -1;
  }
  $("view").setAttribute("aria-labelledby", `tab-${tab}`);
  try {
    await TABS[tab][1](isUpdate);
  } catch (error) {
    put($("view"), h("p", { class: "bad" }, error.message));
  }
}

// ------------------------------------------------------------------------------------------------- head

function drawHead() {
  const summary = state.summary,
    steps = summary.total_steps;
  $("title").textContent = summary.name;
  document.title = `${summary.name}: step ${summary.steps}${steps ? ` of ${steps}` : ""}`;
  drawState();
  const end =
    { failed: "This run failed. ", killed: "This run was killed. ", interrupted: "Interrupted: " }[summary.status] ??
    (summary.reason ? "Ended: " : "");
  const isVerdict = Boolean(summary.verdict);
  $("notice").hidden = !isVerdict && !summary.reason;
  put(
    $("notice"),
    summary.reason && h("p", {}, h("b", {}, end), summary.reason),
    isVerdict && h("p", {}, h("b", {}, "This run does not learn. "), summary.verdict),
  );
  const change = (first, last) =>
    first === null || first === last ? number(last) : `${number(first)} → ${number(last)}`;
  const facts = {
    step: steps ? `${number(summary.steps)} / ${number(steps)}` : number(summary.steps),
    reward: change(summary.reward_first, summary.reward_last),
    "held out": change(summary.eval_first, summary.eval_last),
    time: duration(summary.seconds),
    "weights version": number(summary.version),
    model: summary.model,
  };
  put(
    $("summary"),
    Object.entries(facts)
      .filter(([, value]) => value)
      .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
  drawRuns();
  const tabs = Object.entries(TABS).filter(([name]) => name !== "service" || summary.is_service);
  if (tabs.length !== $("tabs").childElementCount) {
    put(
      $("tabs"),
      tabs.map(([name, [title]]) =>
        h(
          "button",
          {
            type: "button",
            role: "tab",
            id: `tab-${name}`,
            "aria-controls": "view",
            "aria-selected": String(name === place.tab),
            tabindex: name === place.tab ? 0 : -1,
            onclick: () => show(name),
          },
          title,
        ),
      ),
    );
  }
}

function drawState() {
  const status = state.summary ? statusOf(state.summary) : "connecting",
    isWell = ["live", "running", "serving"].includes(status);
  $("state").textContent = state.isConnected ? status : "connection lost";
  $("state").className =
    `chip ${!state.isConnected || (state.summary && isBad(state.summary)) ? "lost" : isWell ? "live" : ""}`;
}

// ------------------------------------------------------------------------------------------------- events

const GATHER_MILLISECONDS = 200; // the news of all runs come at once
let changed = [],
  waiting = null;

function listen() {
  const events = new EventSource("/api/events");
  events.onopen = () => {
    state.isConnected = true;
    drawState();
  };
  events.onerror = () => {
    state.isConnected = false;
    drawState();
  };
  events.onmessage = (event) => {
    const { run, parts } = JSON.parse(event.data); // without a run, a host started or stopped one
    changed.push(...(parts ?? ["record"]).map((part) => [run, part]));
    waiting ??= setTimeout(update, GATHER_MILLISECONDS);
  };
}

/** Draw what has changed. Lists are renewed; a conversation that is being read stays. */
async function update() {
  const news = changed;
  [changed, waiting] = [[], null];
  if (news.some(([run, part]) => run !== place.run && ["metrics", "record"].includes(part))) {
    state.runs = (await get("runs")).runs;
    if (!describeRun(place.run)) return location.reload();
    drawRuns();
  }
  const own = news.filter(([run]) => run === place.run).map(([, part]) => part);
  if (own.some((part) => ["metrics", "record", "groups", "evaluations"].includes(part))) await refresh();
  const shown = place.tab === "curves" ? news.filter(([run]) => state.ticked.has(run)).map(([, part]) => part) : own;
  if (TABS[place.tab][2].some((part) => shown.includes(part))) await show(place.tab, true);
}

async function followAddress() {
  readAddress();
  if (!(place.tab in TABS)) place.tab = "curves";
  for (const name of (place.ticked ?? "").split("|")) if (describeRun(name)) state.ticked.add(name);
  // The first to be seen is the one of the address, one that runs, or the one that changed last.
  const newest = [...state.runs].sort((a, b) => b.is_live - a.is_live || (b.changed_at ?? 0) - (a.changed_at ?? 0))[0];
  const first = describeRun(place.run) ?? newest;
  if (first === undefined)
    return put(
      $("view"),
      h("p", { class: "empty" }, "There is no run yet. It appears here with the first request of its user."),
    );
  if (place.run !== undefined && place.run !== first.name)
    put($("view"), h("p", { class: "bad" }, `There is no run ${place.run}.`));
  state.ticked.add(first.name);
  place.run = first.name;
  await choose(first.name, false);
}

$("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  if (state.summary) drawHead();
  show(place.tab);
});
connectRuns({ choose, tick });
roving($("tabs"), "button", { next: "ArrowRight", previous: "ArrowLeft" });
addEventListener("resize", resizeCurves);
addEventListener("popstate", followAddress);

try {
  state.runs = (await get("runs")).runs;
  await followAddress();
  listen();
} catch (error) {
  put($("view"), h("p", { class: "bad" }, error.message));
}
