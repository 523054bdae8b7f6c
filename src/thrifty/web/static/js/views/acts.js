// What was asked of a study or of one of its trials, its notes and tags; and asking, where that is allowed.

import { act, branchCost } from "../api.js";
import { card, fill, h } from "../dom.js";
import { count, moment } from "../format.js";

const RUN = ["running", "paused"];
// the next process that runs such a study does what was asked
const HOLDABLE = ["interrupted", "stopped"];
const HOLDING = ["stop", "pause", "resume"];
const MAX_EPOCHS = 1_000_000; // as the server has it

export class Acts {
  element = h("div", {});
  #path;
  #trial;
  #update;
  #said = h("p", { class: "note", role: "status" });
  #tags = h("p", { class: "tags" });
  #list = h("ul", { class: "acts" });
  #controls = h("div", { class: "controls" });
  #drawn = "";
  #runs = true;

  constructor({ path, trial = null, update }) {
    this.#path = path;
    this.#trial = trial;
    this.#update = update;
  }

  // state is that of the study, or of the trial; names of hyper-parameters, horizon and config are the trial's
  // and name is that of the study, if it may be deleted here; maxEpochs is how long it trains its trials
  draw({ acts, can_act: canAct }, state, { names = [], horizon = 0, config = null, name = "", maxEpochs = 0 } = {}) {
    const mine = acts.filter((each) => each.trial === this.#trial || this.#trial === null);
    if (!canAct && !mine.length) {
      fill(this.element);
      return;
    }
    this.#drawTags(mine, canAct);
    fill(
      this.#list,
      mine
        .filter((each) => each.kind !== "tag" && each.kind !== "untag")
        .map((each) =>
          h(
            "li",
            {},
            h("span", { class: "note" }, `${moment(each.at)} ${each.who} `),
            this.#what(each),
            each.queued && h("span", { class: "badge" }, "queued"),
            each.answer && h("span", { class: "note" }, ` (${each.answer})`),
          ),
        ),
    );
    const stops = RUN.includes(state) || (this.#trial === null && HOLDABLE.includes(state));
    this.#runs = RUN.includes(state);
    const deletes = name && !this.#runs;
    const asked = acts.filter((each) => each.queued && HOLDING.includes(each.kind)).at(-1)?.kind ?? "";
    const isHeld = asked === "pause" || (asked === "stop" && !this.#runs) || (!asked && state === "paused");
    // what holds a study can be taken back also where nothing runs that could be stopped
    const pauses = this.#trial === null && (isHeld ? "resume" : stops && "pause");
    const key = `${canAct} ${stops} ${pauses} ${deletes} ${horizon} ${maxEpochs} ${names}`;
    if (key !== this.#drawn) {
      this.#drawn = key; // what somebody is writing stays
      fill(
        this.#controls,
        canAct && [
          stops && this.#stopButton(),
          pauses && this.#pauseButton(pauses),
          maxEpochs > 0 && this.#lengthForm(maxEpochs),
          this.#form("note"),
          this.#form("tag"),
          names.length > 0 && horizon > 1 && this.#branchForm(names, horizon),
          config && this.#configForm(config),
          deletes && this.#deleteForm(name),
        ],
      );
    }
    if (!this.element.hasChildNodes()) {
      const note = this.#trial === null ? "what was asked of the study and its trials" : "what was asked of this trial";
      fill(this.element, card("Notes and acts", note, this.#tags, this.#list, this.#controls, this.#said));
    }
  }

  #drawTags(acts, canAct) {
    const tags = new Set();
    for (const each of acts) {
      if (each.trial !== this.#trial) continue;
      if (each.kind === "tag") tags.add(each.text);
      if (each.kind === "untag") tags.delete(each.text);
    }
    fill(
      this.#tags,
      [...tags].map((text) =>
        h(
          "span",
          { class: "badge" },
          text,
          canAct &&
            h(
              "button",
              {
                type: "button",
                class: "quiet",
                "aria-label": `remove the tag ${text}`,
                onclick: () => this.#ask({ kind: "untag", text }),
              },
              "×",
            ),
        ),
      ),
    );
  }

  #what(each) {
    const where = each.trial === null || this.#trial !== null ? "" : `trial ${each.trial}: `;
    if (each.kind === "note") return [where, each.text];
    if (each.kind === "branch") return `branch of trial ${each.trial} ${each.text}`;
    if (each.kind === "enqueue") {
      const which = each.trial === null ? "a trial" : `trial ${each.trial}`;
      return `${which} with ${each.text || "nothing changed"}`;
    }
    if (each.kind === "lengthen") return `train the study's trials for ${each.text} epochs`;
    if (each.kind === "extend") return `extend the study: ${each.text}`;
    return each.kind === "stop trial" ? `stop trial ${each.trial}` : `${each.kind} the study`;
  }

  #pauseButton(kind) {
    const ask = () => {
      button.disabled = true;
      this.#ask({ kind });
    };
    const what = kind === "pause" ? "Pause the study" : "Go on";
    const button = h("button", { type: "button", onclick: ask }, what);
    return button;
  }

  #stopButton() {
    const what = this.#trial === null ? "Stop the study" : "Stop this trial";
    // a click by mistake costs hours, so it takes two
    let sure = false;
    const button = h(
      "button",
      {
        type: "button",
        onclick: () => {
          if (!sure) {
            sure = true;
            fill(button, `${what}: click again to confirm`);
            return;
          }
          button.disabled = true;
          this.#ask(this.#trial === null ? { kind: "stop" } : { kind: "stop trial" });
        },
      },
      what,
    );
    return button;
  }

  // longer trials may cost hours, so a first click says what they are
  #lengthForm(now) {
    const field = h("input", {
      type: "number",
      "aria-label": "new number of epochs",
      required: true,
      min: now + 1,
      max: MAX_EPOCHS,
      step: 1,
      value: String(Math.min(2 * now, MAX_EPOCHS)),
    });
    const button = h("button", { type: "submit" }, "Train longer");
    const said = h("p", { class: "note", role: "status" });
    let sure = false;
    const unsure = () => {
      sure = false;
      fill(button, "Train longer");
      fill(said);
    };
    return h(
      "form",
      {
        onsubmit: async (event) => {
          event.preventDefault();
          const epochs = Number(field.value);
          if (!sure) {
            sure = true;
            fill(button, "Train longer: click again to confirm");
            fill(
              said,
              `Trials train for ${count(epochs)} epochs instead of ${count(now)}, from the states in which they have `,
              "ended. A run of the study begins this before it trains, or once it has nothing else to train. It says ",
              "so here if schedules or rungs do not allow it.",
            );
            return;
          }
          unsure();
          await this.#ask({ max_epochs: epochs }, "length");
        },
        oninput: unsure,
      },
      field,
      " epochs ",
      button,
      said,
    );
  }

  // what goes, though it can be restored, is named by who deletes it
  #deleteForm(name) {
    const field = h("input", { type: "text", "aria-label": "the name of the study", placeholder: name });
    const button = h("button", { type: "submit", disabled: true }, "Delete the study");
    field.addEventListener("input", () => {
      button.disabled = field.value !== name;
    });
    return h(
      "form",
      {
        onsubmit: async (event) => {
          event.preventDefault();
          button.disabled = true;
          try {
            await act(this.#path, { name: field.value }, "delete");
            window.location.hash = "#/";
          } catch (problem) {
            fill(this.#said, problem.message);
          }
        },
      },
      field,
      button,
    );
  }

  #form(kind) {
    const field = h("input", {
      type: "text",
      maxlength: kind === "tag" ? 100 : 2000,
      "aria-label": kind === "tag" ? "a tag" : "a note",
      placeholder: kind === "tag" ? "a tag" : "a note",
    });
    return h(
      "form",
      {
        onsubmit: async (event) => {
          event.preventDefault();
          if (field.value.trim() && (await this.#ask({ kind, text: field.value }))) field.value = "";
        },
      },
      field,
      h("button", { type: "submit" }, kind === "tag" ? "Add tag" : "Add note"),
    );
  }

  // a branch is shown with its cost before it is enqueued
  #branchForm(names, horizon) {
    const name = h("select", { "aria-label": "hyper-parameter" }, names.map((each) => h("option", {}, each)));
    const number = (label, props) => h("input", { type: "number", "aria-label": label, required: true, ...props });
    const how = h("select", { "aria-label": "how it changes" }, [
      h("option", { value: "factor" }, "times"),
      h("option", { value: "value" }, "becomes"),
    ]);
    const factor = number("factor", { step: "any", value: "0.3" });
    const value = h("input", { "aria-label": "new value, as JSON", placeholder: '0.01 or "adam"', maxlength: 1000, hidden: true });
    const show = () => {
      const scales = how.value === "factor";
      [factor.hidden, value.hidden] = [!scales, scales];
      [factor.required, value.required] = [scales, !scales];
    };
    how.addEventListener("change", show);
    const epoch = number("epoch", { min: 1, max: horizon - 1, value: String(Math.ceil(horizon / 2)) });
    const cost = h("p", { class: "note", role: "status" });
    const wanted = () => ({
      name: name.value,
      ...(how.value === "factor" ? { factor: Number(factor.value) } : { value: value.value }),
      epoch: Number(epoch.value),
    });
    const form = h(
      "form",
      {
        onsubmit: async (event) => {
          event.preventDefault();
          const branch = wanted();
          try {
            this.#sayCost(cost, branch, await branchCost(this.#path, this.#trial, branch));
          } catch (problem) {
            fill(cost, problem.message);
          }
        },
        oninput: () => fill(cost),
      },
      "Branch: ",
      name,
      " ",
      how,
      " ",
      factor,
      value,
      " after epoch ",
      epoch,
      h("button", { type: "submit" }, "What would it cost?"),
    );
    return [form, cost];
  }

  // the configuration of the trial, to change some values; schedules are written as objects
  #configForm(config) {
    const field = h("textarea", { "aria-label": "a configuration", rows: 4, cols: 60, spellcheck: false });
    field.value = JSON.stringify(config, null, 1);
    const said = h("p", { class: "note", role: "status" });
    const form = h(
      "form",
      {
        onsubmit: async (event) => {
          event.preventDefault();
          let wanted;
          try {
            wanted = JSON.parse(field.value);
          } catch (problem) {
            fill(said, `this is not JSON: ${problem.message}`);
            return;
          }
          fill(said);
          if (await this.#ask({ config: wanted }, "configurations"))
            fill(said, "enqueued; this run of the study, or the next, trains it");
        },
        oninput: () => fill(said),
      },
      field,
      h("button", { type: "submit" }, "Enqueue this configuration"),
    );
    return h("details", {}, h("summary", {}, "Try other values"), form, said);
  }

  #sayCost(place, branch, found) {
    const again = found.epochs_again ? ` (${count(found.epochs_again)} of these trained again)` : "";
    const enqueue = async () => {
      if (await this.#ask(branch, "branches")) fill(place, "enqueued; this run of the study, or the next, trains it");
      else fill(place);
    };
    fill(
      place,
      `${branch.name} = ${found.config[branch.name]}: ${count(found.known_epochs)} epochs known${again}, `,
      `${count(found.epochs_to_train)} to train `,
      h("button", { type: "button", onclick: enqueue }, "Enqueue this branch"),
    );
  }

  async #ask(wanted, route = "acts") {
    try {
      const about = route === "length" ? {} : { trial: this.#trial };
      const made = await act(this.#path, { ...wanted, ...about }, route);
      const now = this.#runs ? "at the end of an epoch" : "by the next process that runs the study";
      const when = route === "length" ? "by this run of the study, or the next" : now;
      fill(this.#said, made.queued ? `asked; it is done ${when}` : "");
      await this.#update();
      return true;
    } catch (problem) {
      fill(this.#said, problem.message);
      return false;
    }
  }
}
