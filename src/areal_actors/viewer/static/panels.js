// Failures, sessions of a service, actors and settings: a table each.

import {
  $,
  counted,
  describeRun,
  duration,
  get,
  h,
  number,
  place,
  put,
  select,
  state,
  table,
  words,
} from "./common.js";
import { formatValue } from "./runs.js";

// ------------------------------------------------------------------------------------------------- failures

let filters = null;

export async function showFailures(isUpdate) {
  const renew = () => showFailures(true);
  if (!isUpdate || !$("failures")) {
    const version = (label, placeholder) =>
      h("input", { type: "number", min: 0, placeholder, "aria-label": label, onchange: renew });
    filters = {
      query: h("input", {
        type: "search",
        placeholder: "Search in reasons, tracebacks, problems …",
        "aria-label": "search failures",
        onchange: renew,
      }),
      outcome: select(
        "kind of failure",
        "",
        [
          ["", "all kinds"],
          ["failed", "failed"],
          ["rejected", "rejected by the workflow"],
          ["cut_short", "cut short"],
        ],
        renew,
      ),
      eval: select(
        "purpose",
        "",
        [
          ["", "training and evaluation"],
          ["no", "training"],
          ["yes", "evaluation"],
        ],
        renew,
      ),
      first: version("first version", "from"),
      last: version("last version", "to"),
      source:
        state.summary.sources.length > 0 &&
        select("source", "", [["", "all sources"], ...state.summary.sources.map((name) => [name, name])], renew),
    };
    put(
      $("view"),
      h(
        "div",
        { class: "bar" },
        filters.query,
        filters.outcome,
        filters.eval,
        h("span", { class: "range" }, h("span", { class: "facts" }, "version"), filters.first, filters.last),
        filters.source,
      ),
      h("div", { id: "failures" }),
    );
  }
  const values = Object.fromEntries(
    Object.entries(filters)
      .filter(([, input]) => input)
      .map(([name, input]) => [name, input.value]),
  );
  const isOpen = new Set([...$("failures").querySelectorAll("details[open]")].map((card) => card.dataset.reason));
  const found = (await get("failures", { run: place.run, ...values })).failures;
  const nothing = Object.values(values).some(Boolean) ? "No failure matches." : "No episode failed.";
  put(
    $("failures"),
    found.length
      ? found.map((kind) =>
          h(
            "details",
            { class: "card", open: isOpen.has(kind.reason), "data-reason": kind.reason },
            h("summary", {}, h("b", {}, `${kind.count} ×`), ` ${kind.reason}`),
            h(
              "p",
              { class: "facts" },
              `first: problem ${kind.first.task_id}, sample ${kind.first.sample_idx}, version ${kind.first.version}, ${counted(kind.first.turns, "turn")}, ${number(kind.first.seconds)} s · ${words(kind.first.outcome)}`,
            ),
            kind.count > 1 &&
              h(
                "p",
                { class: "facts" },
                `newest: ${kind.newest.map((one) => `problem ${one.task_id} (version ${one.version}, sample ${one.sample_idx})`).join(", ")}`,
              ),
            kind.first.traceback ? h("pre", {}, kind.first.traceback) : h("p", { class: "facts" }, "No traceback."),
          ),
        )
      : h("p", { class: "empty" }, nothing),
  );
}

// ------------------------------------------------------------------------------------------------- service

/** The sessions of a service: who has them, how far they are, and the feedback that came. */
export async function showService() {
  const { sessions } = await get("served", { run: place.run }),
    now = Date.now() / 1000;
  const stateOf = (one) => (one.ended_at === null ? "open" : one.is_exported ? "handed to training" : "ended");
  const users = new Set(sessions.map((one) => one.user).filter(Boolean));
  const rows = sessions.map((one) =>
    h(
      "tr",
      {},
      h("td", {}, h("code", {}, one.session)),
      h("td", {}, one.user ?? "–"),
      h("td", { class: stateOf(one) === "open" ? "good" : null }, stateOf(one)),
      h("td", { class: "number" }, number(one.num_turns)),
      h("td", { class: "number" }, number(one.num_tokens)),
      h(
        "td",
        { class: "number" },
        one.num_rewards ? `${number(one.reward)}${one.num_rewards > 1 ? ` (${one.num_rewards})` : ""}` : "–",
      ),
      h("td", { class: "number" }, duration(now - one.started_at, true)),
      h("td", { class: "number" }, one.last_turn_at ? duration(now - one.last_turn_at, true) : "–"),
    ),
  );
  const open = sessions.filter((one) => one.ended_at === null).length,
    rewarded = sessions.filter((one) => one.num_rewards).length;
  put(
    $("view"),
    h(
      "p",
      { class: "facts", id: "num-served" },
      `${open} open, ${rewarded} with feedback, of the newest ${counted(sessions.length, "session")}${users.size ? `, by ${counted(users.size, "user")}` : ""}.`,
    ),
    sessions.length
      ? table(
          "Sessions",
          ["session", "user", "state", "turns", "tokens", "reward", "began, ago", "last turn, ago"],
          rows,
        )
      : h("p", { class: "empty" }, "No session yet. They appear with the first request."),
  );
}

// ------------------------------------------------------------------------------------------------- system

const COUNTERS = {
  num_queued: "waiting messages",
  mailbox_size: "room",
  num_running: "running",
  num_waiting_senders: "senders held back",
  num_handled: "handled",
  num_failed: "failed",
  num_cancelled: "cancelled",
  incarnation: "starts",
};

export async function showSystem() {
  const { actors } = await get("run", { run: place.run });
  const rows = Object.entries(actors).map(([name, found]) =>
    h(
      "tr",
      {},
      h("td", {}, name),
      h("td", {}, found.state ?? "–"),
      Object.keys(COUNTERS).map((key) => h("td", { class: "number" }, number(found[key]))),
    ),
  );
  put(
    $("view"),
    h("div", { class: "bar" }, h("button", { type: "button", onclick: () => showSystem() }, "Read again")),
    rows.length
      ? table("Actors", ["actor", "state", ...Object.values(COUNTERS)], rows)
      : h("p", { class: "empty" }, "The actors of a run can be seen while it runs, on the page that it serves."),
  );
}

// ------------------------------------------------------------------------------------------------- settings

const MAX_COMPARED = 6;

/** The settings: changed ones first, or those in which the ticked runs differ. */
export async function showSettings() {
  const others = [...state.ticked].filter((name) => name !== place.run && describeRun(name)).slice(0, MAX_COMPARED - 1);
  const runs = [state.summary, ...(await Promise.all(others.map((run) => get("run", { run }))))];
  if (!Object.keys(state.summary.all_settings).length)
    return put(
      $("view"),
      h("p", { class: "empty" }, "The settings of this run are shown to its operator only, or it has none."),
    );
  const paths = [...new Set(runs.flatMap((run) => Object.keys(run.all_settings)))];
  const isDifferent = (path) => new Set(runs.map((run) => JSON.stringify(run.all_settings[path]?.value))).size > 1;
  const isChanged = (path) => runs.some((run) => run.all_settings[path]?.is_changed);
  const search = h("input", {
    type: "search",
    placeholder: "Search settings …",
    "aria-label": "search settings",
    oninput: () => draw(),
  });
  const shown = select(
    "which settings",
    runs.length > 1 ? "different" : "changed",
    [
      ["changed", "changed from the default"],
      ...(runs.length > 1 ? [["different", "different between ticked runs"]] : []),
      ["all", "all, changed first"],
    ],
    () => draw(),
  );
  const list = h("div");
  function draw() {
    const wanted = { changed: isChanged, different: isDifferent, all: () => true }[shown.value],
      query = search.value.toLowerCase();
    const found = paths
      .filter(
        (path) =>
          wanted(path) &&
          `${path} ${runs.map((run) => formatValue(run.all_settings[path]?.value)).join(" ")}`
            .toLowerCase()
            .includes(query),
      )
      .sort((a, b) => isChanged(b) - isChanged(a) || paths.indexOf(a) - paths.indexOf(b));
    const rows = found.map((path) =>
      h(
        "tr",
        {},
        h("th", { scope: "row", class: "path" }, path),
        runs.map((run) =>
          h(
            "td",
            { class: run.all_settings[path]?.is_changed ? "changed" : null },
            formatValue(run.all_settings[path]?.value),
          ),
        ),
      ),
    );
    put(
      list,
      found.length
        ? table("Settings", ["setting", ...runs.map((run) => (runs.length > 1 ? run.name : "value"))], rows)
        : h("p", { class: "empty" }, "No setting matches."),
    );
  }
  put(
    $("view"),
    h("div", { class: "bar" }, search, shown),
    h("p", { class: "facts" }, `${state.summary.run_dir}/config.yaml; keys are shortened, changed values are bold`),
    list,
  );
  draw();
}
