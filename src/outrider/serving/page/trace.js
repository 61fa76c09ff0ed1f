// The view of a trace: tokens coloured by where they come from, a strip of rounds, and the details of one round.
// A trace is a list of rounds as `outrider serve` writes them (docs/serving.md, "Traces").
//
//   const view = new TraceView({tokens, rounds, detail});   // three elements
//   view.add(round);  view.clear();
"use strict";

const NAMES = {
  draft: "accepted draft", copy: "accepted copy", correction: "correction", bonus: "bonus", plain: "plain",
};
const MEANINGS = {
  draft: "Drafted by the drafter, accepted by the target",
  copy: "Copied from the text so far, accepted by the target",
  correction: "The target's own token in place of a rejected draft",
  bonus: "The target's own token behind accepted drafts",
  plain: "The target's own token, no draft was verified",
};

// An element with attributes (class, text, ...) and children; texts are never read as HTML.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value;
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function legend(list) {
  for (const [kind, name] of Object.entries(NAMES)) {
    list.append(make("li", {title: MEANINGS[kind]}, make("span", {class: kind, text: name})));
  }
}

const shown = (text) => text.replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5").replace(/ /g, "\u00b7") || "\u2205";
const percent = (p) => p === null || p === undefined ? "\u2013" : p > 0 && p < 0.005 ? "<\u20091\u2009%" : `${Math.round(100 * p)}\u2009%`;
const count = (n, thing) => `${n} ${thing}${n === 1 ? "" : "s"}`;

class TraceView {
  constructor({tokens, rounds, detail}) {
    Object.assign(this, {tokens, rounds, detail, explained: false});
    this.clear();
    for (const [list, items] of [[tokens, "spans"], [rounds, "columns"]]) {
      const at = (event) => {
        const item = event.target.closest("[role=option]");
        return item ? this[items].indexOf(item) : -1;
      };
      list.addEventListener("click", (event) => at(event) >= 0 && this.select(this.placeOf(items, at(event)), list));
      list.addEventListener("pointerover", (event) => at(event) >= 0 && event.pointerType === "mouse" && this.show(this.placeOf(items, at(event))));
      list.addEventListener("pointerleave", () => this.selected !== null && this.show(this.selected));
      list.addEventListener("focusin", (event) => at(event) >= 0 && this.select(this.placeOf(items, at(event))));
      list.addEventListener("keydown", (event) => this.key(event, list));
    }
  }

  clear() {
    this.trace = []; this.spans = []; this.columns = []; this.owners = []; this.firsts = [];
    this.selected = null; this.chosen = false;
    this.tokens.replaceChildren(); this.rounds.replaceChildren();
    this.detail.replaceChildren(make("p", {class: "note", text: "Point at a token or a round, or move through them with the arrow keys."}));
  }

  // A place is the index of a token; a round is shown by its last one, which is the target's own.
  placeOf(items, index) {
    if (items === "spans") return index;
    return (index + 1 < this.firsts.length ? this.firsts[index + 1] : this.spans.length) - 1;
  }

  add(round) {
    const number = this.trace.push(round) - 1;
    this.firsts.push(this.spans.length);
    for (const token of round.tokens) {
      const kind = token.origin === "draft" && round.source === "copy" ? "copy" : token.origin;
      const lines = token.in_text && token.text.includes("\n") ? " line" : "";
      const span = make("span", {
        class: `token ${kind}${token.in_text ? "" : " special"}${lines}`, role: "option", tabindex: "-1", "aria-selected": "false",
        "aria-label": `${shown(token.text)}, ${NAMES[kind]}, round ${round.round}`, text: token.text,
      });
      this.tokens.append(span); this.spans.push(span); this.owners.push(number);
    }
    const accepted = round.drafts.filter((draft) => draft.outcome === "accepted").length;
    const kind = round.source === "copy" ? "copy" : "draft", own = round.tokens.at(-1);
    const column = make("div", {
      class: `round ${kind}`, role: "option", tabindex: "-1", "aria-selected": "false",
      "aria-label": `round ${round.round}: ${count(round.drafts.length, "draft")}, ${accepted} accepted`,
    });
    if (own && own.origin !== "draft") column.append(make("span", {class: `cell own ${own.origin}`}));
    for (const draft of round.drafts) column.append(make("span", {class: `cell ${draft.outcome.replace(" ", "-")}`}));
    this.rounds.append(column); this.columns.push(column);
    if (this.spans.length && !this.chosen) {
      this.mark(this.spans.length - 1);
      this.rounds.scrollLeft = this.rounds.scrollWidth;
    }
  }

  select(place, focused = null) {
    this.chosen = true;
    this.mark(place);
    if (focused) (focused === this.tokens ? this.spans[place] : this.columns[this.owners[place]]).focus();
  }

  mark(place) {
    if (this.selected !== null) {
      for (const item of [this.spans[this.selected], this.columns[this.owners[this.selected]]]) {
        item.setAttribute("aria-selected", "false"); item.tabIndex = -1;
      }
      this.span(this.owners[this.selected]).forEach((span) => span.classList.remove("same-round"));
    }
    this.selected = place;
    for (const item of [this.spans[place], this.columns[this.owners[place]]]) {
      item.setAttribute("aria-selected", "true"); item.tabIndex = 0;
    }
    this.span(this.owners[place]).forEach((span) => span.classList.add("same-round"));
    this.show(place);
  }

  span(round) { return this.spans.slice(this.firsts[round], this.firsts[round + 1]); }

  key(event, list) {
    if (this.selected === null) return;
    const round = this.owners[this.selected], last = this.spans.length - 1;
    const to = (number) => this.placeOf("columns", Math.max(0, Math.min(this.trace.length - 1, number)));
    const step = list === this.tokens
      ? {ArrowLeft: this.selected - 1, ArrowRight: this.selected + 1, ArrowUp: to(round - 1), ArrowDown: to(round + 1), Home: 0, End: last}
      : {ArrowLeft: to(round - 1), ArrowRight: to(round + 1), Home: to(0), End: last};
    if (!(event.key in step) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.select(Math.max(0, Math.min(last, step[event.key])), list);
    this.columns[this.owners[this.selected]].scrollIntoView({block: "nearest", inline: "nearest"});
  }

  // The round of a token, its drafts, and what the target had in place of the token.
  show(place) {
    const number = this.owners[place], round = this.trace[number], token = round.tokens[place - this.firsts[number]];
    const verified = round.drafts.filter((draft) => draft.outcome !== "left out").length;
    const accepted = round.drafts.filter((draft) => draft.outcome === "accepted").length;
    const kind = token.origin === "draft" && round.source === "copy" ? "copy" : token.origin;
    const sum = round.drafts.length
      ? `${count(round.drafts.length, "draft")} by ${round.source === "copy" ? "copying the text so far" : "the drafter"}, ${verified} verified, ${accepted} accepted; ${count(round.tokens.length, "token")} in all.`
      : "Nothing was drafted; the target gave one token.";
    const parts = [
      make("h3", {text: `Round ${round.round}`}),
      make("p", {text: sum}),
      make("p", {class: "why"}, make("strong", {text: "Why it stopped there: "}), `${round.reason}.`),
    ];
    if (round.drafts.length) parts.push(this.draftTable(round, token));
    parts.push(make("h3", {}, "Token ", make("span", {class: `token ${kind}`, text: shown(token.text)}), `: ${NAMES[kind]}`));
    parts.push(make("p", {class: "note", text: `${MEANINGS[kind]}. The target\u2019s likeliest at its place:`}));
    const likely = make("dl", {class: "likely"});
    const rows = token.top.some((one) => one.id === token.id) ? token.top : [...token.top, token];
    for (const one of rows) {
      const bar = make("span", {class: "bar"});
      bar.style.width = `${100 * one.target}%`;
      likely.append(
        make("dt", {class: one.id === token.id ? "taken" : null, text: shown(one.text)}),
        make("dd", {}, bar), make("dd", {text: percent(one.target)}),
      );
    }
    parts.push(likely);
    this.detail.replaceChildren(...parts);
  }

  draftTable(round, token) {
    const head = make("tr", {}, ...[
      ["draft", "a token and what became of it"], ["raw", "confidence of the drafter's head"],
      ["calib.", "confidence as outrider calibrate fitted it"], ["belief", "confidence as earlier outcomes have corrected it: what the schedule reads"],
      ["p_d", "probability that the draft was drawn with; 100 % where it was chosen, as at temperature 0"],
      ["p_t", "what verification compared with it; 100 % or 0 % where the target's token is settled"],
      ["target", "the target's own probability of it, before temperature and penalties"],
    ].map(([text, title]) => make("th", {scope: "col", text, title})));
    const marks = {accepted: "\u2713", rejected: "\u2717", unread: "\u00b7", "left out": "\u2013"};
    const rows = round.drafts.map((draft, node) => make(
      "tr", {class: token.draft === node ? "shown" : null},
      make("td", {title: draft.outcome}, make("span", {class: `outcome ${draft.outcome.replace(" ", "-")}`, text: `${marks[draft.outcome]} `}), shown(draft.text),
        make("span", {class: "hidden", text: ` ${draft.outcome}`})),
      ...["raw", "calibrated", "believed", "p_draft", "p_target", "target"].map((name) => make("td", {text: percent(draft[name])})),
    ));
    const table = make("table", {}, make("caption", {class: "hidden", text: `Drafts of round ${round.round}`}), make("thead", {}, head), make("tbody", {}, ...rows));
    const notes = make("details", {class: "note"},
      make("summary", {text: "\u2713 accepted, \u2717 rejected, \u00b7 not reached, \u2013 left out by the schedule"}),
      make("p", {text: "Confidences: raw is the drafter\u2019s head\u2019s, calib. as outrider calibrate fitted it, belief as outcomes have corrected it, which the schedule reads. "
        + "Verification compares p_t with p_d, the probabilities after temperature and penalties; at temperature 0 nothing is drawn, and they are 100 % or 0 %. "
        + "target is the target\u2019s own probability, before them."}));
    notes.open = this.explained;
    notes.addEventListener("toggle", () => { this.explained = notes.open; });
    return make("div", {}, make("div", {class: "wide", tabindex: "0", role: "group", "aria-label": "drafts of the round"}, table), notes);
  }
}
