//! Models that are given by their name on the Hugging Face hub.

use crate::args::HubArgs;
use crate::error::CliError;
#[cfg(not(feature = "hub"))]
use std::path::Component;
use std::path::{Path, PathBuf};

/// Returns the folder of a model, given by its path or its name. Downloads what is missing, with a
/// progress bar.
pub fn folder(model: &Path, args: &HubArgs) -> Result<PathBuf, CliError> {
    find(model, args, false)
}

/// Returns the folder of a model as [`folder`] does; the weights of a name need not be in it.
pub fn folder_without_weights(model: &Path, args: &HubArgs) -> Result<PathBuf, CliError> {
    find(model, args, true)
}

#[cfg(feature = "hub")]
fn find(model: &Path, args: &HubArgs, without_weights: bool) -> Result<PathBuf, CliError> {
    use marlin_lm::hub::{HubOptions, resolve};

    let options = HubOptions {
        revision: args.revision.clone(),
        offline: args.offline,
        without_weights,
        ..HubOptions::default()
    };
    let mut shown = crate::progress::Progress::of_bytes("downloaded");
    let dir = resolve(model, &options, |progress| {
        shown.set(
            progress.done as usize,
            progress.total as usize,
            progress.file,
        );
    });
    shown.finish();
    Ok(dir?)
}

#[cfg(not(feature = "hub"))]
fn find(model: &Path, _: &HubArgs, _: bool) -> Result<PathBuf, CliError> {
    // A path of two parts, `owner/name`, is the form of a name.
    let parts = || model.components();
    let is_name = parts().count() == 2 && parts().all(|part| matches!(part, Component::Normal(_)));
    if is_name && !model.exists() {
        return Err(CliError::NoHub {
            model: model.into(),
        });
    }
    Ok(model.into())
}
