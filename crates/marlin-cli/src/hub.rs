//! Models that are given by their name on the Hugging Face hub.

use crate::args::HubArgs;
use crate::error::CliError;
use std::path::{Path, PathBuf};

/// Returns the folder of a model, given by its path or its name. Downloads what is missing, with a
/// progress bar.
#[cfg(feature = "hub")]
pub fn folder(model: &Path, args: &HubArgs) -> Result<PathBuf, CliError> {
    use marlin_lm::hub::{HubOptions, resolve};

    let options = HubOptions {
        revision: args.revision.clone(),
        offline: args.offline,
        ..HubOptions::default()
    };
    let bar = crate::output::progress_of_bytes(0);
    let dir = resolve(model, &options, |progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.done);
        bar.set_message(progress.file.to_owned());
    });
    bar.finish_and_clear();
    Ok(dir?)
}

/// Returns the folder of a model, given by its path.
#[cfg(not(feature = "hub"))]
pub fn folder(model: &Path, _: &HubArgs) -> Result<PathBuf, CliError> {
    Ok(model.into())
}
