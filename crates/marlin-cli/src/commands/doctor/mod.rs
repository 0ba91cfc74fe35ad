//! Checks of the machine, of the program and of a folder.

mod caches;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod folder;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod packages;
mod program;
mod report;
#[cfg(feature = "vulkan")]
mod vulkan;

#[cfg(not(all(feature = "cuda", feature = "vulkan")))]
use self::report::Check;
use self::report::{Section, Status};
use crate::args::DoctorArgs;
use crate::device::DeviceName;
use crate::error::CliError;
use crate::{hub, output};
use serde::Serialize;

#[derive(Serialize)]
struct Report {
    sections: Vec<Section>,
    warnings: usize,
    errors: usize,
}

/// Runs every check. Only a check that ends in an error is an error of the command.
pub fn run(args: &DoctorArgs) -> Result<(), CliError> {
    let (cuda, vulkan) = (cuda(), vulkan());
    let is_usable = |name: DeviceName| match name {
        DeviceName::Cuda => cuda.count(Status::Error) == 0,
        DeviceName::Vulkan => vulkan.count(Status::Error) == 0,
        DeviceName::Cpu | DeviceName::Flex => true,
    };
    let default = DeviceName::DEFAULTS
        .into_iter()
        .filter(|&name| is_usable(name))
        .find_map(|name| Some((name, name.find()?)));
    let mut sections = vec![
        program::check(default.as_ref().map(|(name, _)| *name)),
        cuda,
        vulkan,
        cpu::check(),
        caches::check(),
    ];
    if let Some(dir) = &args.dir {
        let device = match args.device {
            Some(name) => name.find().ok_or_else(|| CliError::no_device(name))?,
            None => default
                .map(|(_, device)| device)
                .ok_or_else(|| CliError::no_device(DeviceName::Flex))?,
        };
        let dir = hub::folder(dir, &args.hub)?;
        sections.push(folder::check(&dir, &device));
    }
    let count = |status| sections.iter().map(|section| section.count(status)).sum();
    let report = Report {
        warnings: count(Status::Warning),
        errors: count(Status::Error),
        sections,
    };
    if args.json {
        output::json(&report)?;
    } else {
        let sections: Vec<_> = report.sections.iter().map(Section::lines).collect();
        output::line(&sections.concat().join("\n"))?;
    }
    match report.errors {
        0 => Ok(()),
        count => Err(CliError::Checks { count }),
    }
}

#[cfg(feature = "cuda")]
fn cuda() -> Section {
    cuda::check()
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Section {
    not_built("cuda")
}

#[cfg(feature = "vulkan")]
fn vulkan() -> Section {
    vulkan::check()
}

#[cfg(not(feature = "vulkan"))]
fn vulkan() -> Section {
    not_built("vulkan")
}

/// Returns the section of a runtime that is not compiled in.
#[cfg(not(all(feature = "cuda", feature = "vulkan")))]
fn not_built(name: &'static str) -> Section {
    let check = Check::warning(name, "not compiled in", program::feature(name));
    Section {
        name,
        checks: vec![check],
    }
}
