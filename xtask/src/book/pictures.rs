//! The check of the book's pictures that are drawn from records: a program of `benches/plots` draws
//! each again, and both must be equal.

use crate::process::{Error, in_workspace, root, run, target};
use std::fs;

/// A picture in `book/src`, the program in `benches/plots` that draws it, and the arguments of the
/// program before the picture's path.
struct Picture {
    name: &'static str,
    program: &'static str,
    arguments: &'static [&'static str],
}

const PICTURES: [Picture; 7] = [
    Picture {
        name: "overview.svg",
        program: "overview.py",
        arguments: &["benches", "wide"],
    },
    Picture {
        name: "overview-narrow.svg",
        program: "overview.py",
        arguments: &["benches", "narrow"],
    },
    Picture {
        name: "prompts.svg",
        program: "prompts.py",
        arguments: &[
            "benches/records/prompts-h200.json",
            "benches/plots/pytorch-h200.json",
        ],
    },
    Picture {
        name: "family.svg",
        program: "family.py",
        arguments: &[
            "benches/records/family-h100.json",
            "benches/records/family-20m-h100.json",
            "projections",
        ],
    },
    Picture {
        name: "serving-tpot.svg",
        program: "serving.py",
        arguments: &["benches/records/serve-llama-2-7b-h200.json", "tpot"],
    },
    Picture {
        name: "serving-ttft.svg",
        program: "serving.py",
        arguments: &["benches/records/serve-llama-2-7b-h200.json", "ttft"],
    },
    Picture {
        name: "timeline.svg",
        program: "timeline.py",
        arguments: &["benches/records/overlap-trace-h100.csv"],
    },
];

/// Returns a line for each picture that is not what its program draws, after writing it anew if
/// `update` is true.
pub fn stale(update: bool) -> Result<Vec<String>, Error> {
    let folder = target().join("pictures");
    fs::create_dir_all(&folder).map_err(Error::file(&folder))?;
    let mut faults = Vec::new();
    for picture in &PICTURES {
        let drawn = folder.join(picture.name);
        let program = format!("benches/plots/{}", picture.program);
        // Python's own library is enough; no compiled modules are left beside the programs.
        let mut draw = in_workspace("python3");
        draw.args(["-B", &program]).args(picture.arguments);
        run(draw.arg(&drawn))?;
        let shown = root().join("book/src").join(picture.name);
        let read = |path| fs::read(path).map_err(Error::file(path));
        let drawn = read(&drawn)?;
        if update {
            fs::write(&shown, drawn).map_err(Error::file(&shown))?;
        } else if read(&shown)? != drawn {
            faults.push(format!(
                "book/src/{}: not what {program} draws from {}; `cargo xtask book --update` draws \
                 it anew",
                picture.name,
                picture.arguments.join(" ")
            ));
        }
    }
    Ok(faults)
}
