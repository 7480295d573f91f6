// One conversation: its agents as a tree of turns, and each sampled token with its probability, mask, version and advantage.

import { counted, h, number, signed, words } from "./common.js";

const SHADES = 8,
  LEAST_LOGPROB = -4; // a token of 2 % has the darkest ground

export function drawSession(session, run) {
  const turns = new Map(session.turns.map((turn) => [turn.id, turn])),
    children = new Map();
  for (const turn of session.turns) {
    const parent = turns.has(turn.parent) ? turn.parent : null;
    children.set(parent, [...(children.get(parent) ?? []), turn]);
  }
  const facts = [
    `reward ${number(session.reward)}`,
    counted(session.num_turns, "turn"),
    `${number(session.seconds)} s`,
    `sampled under version ${session.version}`,
    session.limit && `stopped by ${words(session.limit)}`,
    ...Object.entries(session.logged ?? {}).map(([name, value]) => `${name} ${number(value)}`),
  ];
  const context = {
    session,
    run,
    children,
    numbers: new Map(session.turns.map((turn, index) => [turn.id, index + 1])),
    untrained: new Map((session.untrained ?? []).map((entry) => [entry.interaction, entry])),
    strongest: Math.max(1e-12, ...session.turns.flatMap((turn) => turn.advantages.map(([value]) => Math.abs(value)))),
  };
  return [
    h("p", { class: "facts" }, facts.filter(Boolean).join(" · ")),
    session.failure && h("pre", { class: "bad" }, session.failure),
    drawKey(),
    drawTree(null, context, true),
    session.num_turns > session.turns.length &&
      h("p", { class: "facts" }, `${counted(session.num_turns - session.turns.length, "more turn")}.`),
  ];
}

const drawKey = () =>
  h(
    "p",
    { class: "key facts" },
    "Each token: ",
    h(
      "span",
      { class: "tokens" },
      h("i", { class: "p0" }, "certain"),
      h("i", { class: "p3" }, "likely"),
      h("i", { class: "p7" }, "unlikely"),
    ),
    " ground; ",
    h(
      "span",
      { class: "tokens" },
      h("i", { class: "up2" }, "pushed up"),
      h("i", { class: "down2" }, "pushed down"),
      h("i", { class: "off" }, "not trained"),
    ),
    " line. Point at a token, or tap it, for its numbers.",
  );

/** Draw what is below a turn: its chain, and branches and sub-agents folded, as a tree. */
function drawTree(parent, context, isRoot = false) {
  const drawn = [];
  let below = context.children.get(parent) ?? [],
    agent = null;
  while (below.length === 1 && (drawn.length === 0 || (below[0].tag ?? null) === agent)) {
    agent = below[0].tag ?? null;
    drawn.push(drawTurn(below[0], context));
    below = context.children.get(below[0].id) ?? [];
  }
  return [
    ...drawn,
    ...below.map((turn, index) =>
      h(
        "details",
        { class: "branch", open: index === 0 || below.length < 4 },
        h("summary", {}, titleOf(turn, isRoot && drawn.length === 0, context)),
        drawBranch(turn, context),
      ),
    ),
  ];
}

const drawBranch = (turn, context) => [drawTurn(turn, context), drawTree(turn.id, context)];

function titleOf(turn, isRoot, context) {
  const count = (id) => (context.children.get(id) ?? []).reduce((sum, child) => sum + 1 + count(child.id), 0);
  const name = turn.tag
    ? `agent ${turn.tag}`
    : isRoot
      ? `conversation from turn ${context.numbers.get(turn.id)}`
      : `branch from turn ${context.numbers.get(turn.id)}`;
  const line = (turn.messages.at(-1)?.content ?? "").split("\n")[0].slice(0, 80);
  return [
    h("b", {}, name),
    ` · ${counted(count(turn.id) + 1, "turn")}${turn.reward === null ? "" : ` · reward ${number(turn.reward)}`}${line ? ` · ${line}` : ""}`,
  ];
}

function drawTurn(turn, context) {
  const mask = expand(turn.mask ?? [], turn.tokens.length),
    facts = [
      `turn ${context.numbers.get(turn.id)}`,
      turn.tag && `agent ${turn.tag}`,
      `${number(turn.num_prompt_tokens)} prompt + ${number(turn.num_tokens)} sampled tokens`,
      turn.reward !== null && `reward ${number(turn.reward)}`,
      typeof turn.return === "number" &&
        `return ${number(turn.return)}${turn.credit === "inherited" ? " (inherited from the episode)" : ""}`,
      words(turn.finish),
    ];
  const isFirst = turn.fork === "root" || turn.parent === null,
    last = turn.messages.length - 1;
  // System text and examples come before the problem, and are the same in every episode.
  const before = isFirst ? turn.messages.slice(0, last) : [],
    shown = isFirst ? turn.messages.slice(Math.max(last, 0)) : turn.messages;
  return h(
    "div",
    { class: "turn" },
    h("p", { class: "facts" }, facts.filter(Boolean).join(" · ")),
    turn.fork && turn.fork !== "root" && h("p", { class: "why" }, `New branch of tokens: ${words(turn.fork)}.`),
    turn.failure && h("p", { class: "bad" }, turn.failure),
    before.length > 0 &&
      h(
        "details",
        { class: "before" },
        h("summary", {}, `${counted(before.length, "earlier message")}: system text, tools or examples`),
        before.map((message) => drawMessage(message, "")),
      ),
    shown.map((message) => drawMessage(message, "")),
    turn.tokens.length ? drawAnswer(turn, mask, context) : turn.answer && drawMessage(turn.answer, "answer"),
    h("p", { class: "push" }, describePush(turn, mask, context)),
  );
}

function drawAnswer(turn, mask, context) {
  const versions = expand(turn.versions ?? [], turn.tokens.length),
    advantages = expand(turn.advantages, turn.tokens.length),
    hasMany = new Set(versions).size > 1;
  const detail = h("p", { class: "facts", role: "status" });
  const tokens = turn.tokens.map(([text, logprob], index) => {
    const push = mask[index] ? signOf(advantages[index]) : "off",
      strength = Math.ceil((Math.abs(advantages[index]) / context.strongest) * 3);
    const told = `probability ${number(logprob === null ? null : Math.exp(logprob))} (log ${number(logprob)}) · ${mask[index] ? (turn.step === null ? "in the loss mask" : `advantage ${signed(advantages[index])}`) : "not trained"} · version ${versions[index] ?? "–"}`;
    const changed = hasMany && versions[index] !== versions[index - 1];
    return [
      changed && h("sup", { class: "version" }, `v${versions[index]}`),
      h(
        "i",
        {
          class: `p${shade(logprob)} ${push}${push && push !== "off" ? strength : ""}`,
          title: told,
          onclick: () => {
            detail.textContent = `“${text}”: ${told}`;
          },
        },
        text.replaceAll("\n", "↵\n"),
      ),
    ];
  });
  const { answer } = turn,
    calls = answer?.tool_calls ?? [];
  return h(
    "div",
    { class: "message answer" },
    h("b", {}, `${answer?.role ?? "assistant"}`),
    h(
      "p",
      { class: "tokens" },
      tokens,
      turn.num_tokens > turn.tokens.length && ` … ${number(turn.num_tokens - turn.tokens.length)} more`,
    ),
    detail,
    calls.length > 0 &&
      h(
        "details",
        {},
        h("summary", {}, `parsed as ${counted(calls.length, "tool call")}`),
        calls.map((call) => h("pre", {}, `${call.name}(${call.arguments})`)),
      ),
  );
}

const signOf = (advantage) => (advantage > 0 ? "up" : advantage < 0 ? "down" : "");

/** Say in words what the step that trained a turn did to its tokens. */
function describePush(turn, mask, { session, run, untrained }) {
  const entry = untrained.get(turn.id);
  if (entry) return `Not trained: ${words(entry.reason)}.`;
  if (!turn.tokens.length) return "";
  if (!mask.some(Boolean))
    return `Not trained: ${session.failure ? "the episode failed" : session.is_eval ? "evaluations are not trained" : "no row holds this turn"}.`;
  if (turn.step === null)
    return run.is_live
      ? "No step has trained it yet."
      : "No step recorded its advantages: the run ended before, or it was written by an older version.";
  const trained = expand(turn.advantages, turn.tokens.length).filter((_, index) => mask[index]);
  const told = [
    ["up", (value) => value > 0],
    ["down", (value) => value < 0],
  ]
    .map(([direction, test]) => [direction, trained.filter(test)])
    .filter(([, values]) => values.length);
  if (!told.length) return `Step ${turn.step} saw no advantage in it, so that nothing was pushed.`;
  const parts = told.map(
    ([direction, values]) =>
      `${values.length === trained.length ? "all " : ""}${counted(values.length, "token")} ${direction} (${new Set(values).size > 1 ? "mean " : ""}advantage ${signed(values.reduce((sum, value) => sum + value, 0) / values.length)})`,
  );
  return `Step ${turn.step} pushed ${parts.join(" and ")}.`;
}

export const drawMessage = (message, kind) =>
  h(
    "div",
    { class: `message ${kind}` },
    h("b", {}, message.role),
    message.reasoning && h("pre", { class: "reasoning" }, message.reasoning),
    message.content && h("pre", {}, message.content),
    (message.tool_calls ?? []).map((call) => h("pre", {}, `${call.name}(${call.arguments})`)),
  );

const shade = (logprob) =>
  logprob === null ? 0 : Math.min(SHADES - 1, Math.max(0, Math.trunc((logprob / LEAST_LOGPROB) * SHADES)));
const expand = (runs, length) =>
  runs
    .flatMap(([value, count]) => new Array(count).fill(value))
    .concat(new Array(length).fill(0))
    .slice(0, length);
