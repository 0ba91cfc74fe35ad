// The dialog of the settings.

import { byId, element } from "./dom.js";

/** Asks for the settings of a conversation, the model and the API key. */
export class SettingsDialog {
  /** `saved` is called after the settings were changed. */
  constructor(saved) {
    this.dialog = byId("settings");
    byId("settings-form").addEventListener("submit", saved);
    byId("cancel-settings").addEventListener("click", () => this.dialog.close());
  }

  /** Shows the dialog with the focus on a field. */
  open(conversation, { models, model, apiKey }, focus) {
    const options = models.map((name) => element("option", { value: name }, name));
    byId("model").replaceChildren(...options);
    byId("model").value = model;
    byId("system").value = conversation.system;
    byId("temperature").value = conversation.temperature ?? "";
    byId("max-tokens").value = conversation.maxTokens ?? "";
    byId("api-key").value = apiKey;
    if (!this.dialog.open) {
      this.dialog.showModal();
    }
    byId(focus).focus();
  }

  /** Returns what the fields say; null where the server decides. */
  values() {
    const number = (id) => {
      const { valueAsNumber } = byId(id);
      return Number.isNaN(valueAsNumber) ? null : valueAsNumber;
    };
    return {
      model: byId("model").value,
      system: byId("system").value,
      temperature: number("temperature"),
      maxTokens: number("max-tokens"),
      apiKey: byId("api-key").value,
    };
  }
}
