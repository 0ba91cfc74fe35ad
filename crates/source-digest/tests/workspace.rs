//! Tests of the digests of this workspace's routines: each has every item that its kernels name,
//! and every kernel is of a routine or listed as left out.
//!
//! The tests find items in another way than the crate does: by their names, in all files of the
//! crates with kernels, without imports and syntax trees. A name that several items have is taken
//! for any of them.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use source_digest::{Routine, step_sources, workspace};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The folders with kernels, and the names of their crates.
const FOLDERS: [(&str, &str); 5] = [
    ("crates/marlin-kernels/src", "marlin_kernels"),
    ("crates/marlin-nn/src", "marlin_nn"),
    ("crates/marlin-format/src", "marlin_format"),
    ("crates/marlin-quant/src", "marlin_quant"),
    ("examples/ladder/src", "ladder"),
];
/// The words that an item starts with after its attributes, its visibility and its qualifiers.
const KEYWORDS: [&str; 9] = [
    "fn", "struct", "enum", "trait", "union", "type", "static", "impl", "const",
];
/// The endings of names that CubeCL's macros derive from the name of an item.
const DERIVED: [&str; 3] = ["CompilationArg", "Expand", "Launch"];

/// The modules whose kernels are of no routine, so that the ledger has no machine code of them, and
/// what they are for. None of them has tensor cores or asynchronous copies.
const LEFT_OUT: [(&str, &str); 8] = [
    (
        "marlin_kernels::matmul::portable",
        "products on devices without the Marlin kernels",
    ),
    (
        "marlin_kernels::repack",
        "once for each weight that is loaded",
    ),
    (
        "marlin_nn::cache::write",
        "keys and values of prompts that are read without an engine",
    ),
    ("marlin_nn::kernels::embed", "rows of the embedding"),
    ("marlin_nn::kernels::likelihood", "perplexity"),
    (
        "marlin_nn::kernels::rope_cache",
        "rotation and cache of prompts, before the attention of routine `flash`",
    ),
    ("marlin_nn::kernels::sample", "the choice of tokens"),
    ("marlin_quant::gptq", "GPTQ on a device"),
];

/// An item of a file: tokens up to a block or a semicolon.
struct Item {
    file: PathBuf,
    /// The path of the module.
    module: String,
    /// The name; that of the type for an `impl` block, `None` for a macro call.
    name: Option<String>,
    is_impl: bool,
    tokens: Vec<TokenTree>,
}

impl Item {
    /// Returns the path of the item with its module.
    fn path(&self) -> Option<String> {
        let name = self.name.as_ref()?;
        Some(format!("{}::{name}", self.module))
    }

    fn is_reached(&self, names: &BTreeSet<String>) -> bool {
        self.path().is_some_and(|path| names.contains(&path))
    }

    /// Returns true for a type of errors, whose tokens no digest has.
    fn is_error(&self) -> bool {
        self.attributes()
            .any(|(name, arguments)| name == "derive" && arguments.contains("Error"))
    }

    /// Returns the attributes: their names and arguments.
    fn attributes(&self) -> impl Iterator<Item = (String, String)> {
        attributes(&self.tokens)
    }

    /// Returns true if an item may name this item by its visibility alone: if this item is not
    /// private, or the other one is in the same module or below it.
    fn is_visible_to(&self, other: &Self) -> bool {
        words(&self.tokens).next().is_some_and(|word| word == "pub")
            || format!("{}::", other.module).starts_with(&format!("{}::", self.module))
    }

    /// Returns true for a kernel that the host launches.
    fn is_kernel(&self) -> bool {
        self.attributes()
            .any(|(name, arguments)| name == "cube" && arguments.contains("launch"))
    }
}

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Returns every item of the crates with kernels, except tests.
fn items() -> Result<Vec<Item>> {
    let mut items = Vec::new();
    for (folder, name) in FOLDERS {
        let folder = root().join(folder);
        for file in rust_files(&folder)? {
            let mut module = vec![name.to_owned()];
            let inside = file.strip_prefix(&folder)?.with_extension("");
            module.extend(
                inside
                    .iter()
                    .map(|part| part.to_string_lossy().into_owned())
                    .filter(|part| !["lib", "mod"].contains(&part.as_str())),
            );
            let text = fs::read_to_string(&file)?;
            let tokens: TokenStream = text
                .parse()
                .map_err(|error| format!("{}: {error}", file.display()))?;
            add_items(&mut items, &file, &module.join("::"), tokens);
        }
    }
    Ok(items)
}

/// Returns every Rust file below a folder.
fn rust_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            files.extend(rust_files(&path)?);
        } else if path.extension().is_some_and(|end| end == "rs") {
            files.push(path);
        }
    }
    Ok(files)
}

/// Splits the tokens of a file into items.
fn add_items(items: &mut Vec<Item>, file: &Path, module: &str, tokens: TokenStream) {
    let mut of_item: Vec<TokenTree> = Vec::new();
    for token in tokens {
        let is_end = match &token {
            TokenTree::Punct(punct) => punct.as_char() == ';',
            TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
            _ => false,
        };
        of_item.push(token);
        if !is_end {
            continue;
        }
        let tokens = std::mem::take(&mut of_item);
        let is_test = attributes(&tokens)
            .any(|(name, arguments)| name == "test" || name == "cfg" && arguments == "test");
        let is_import = words(&tokens).any(|word| word == "use");
        let keyword = words(&tokens).find(|word| KEYWORDS.contains(&word.as_str()));
        if !is_test && !is_import && tokens.len() > 1 {
            items.push(Item {
                file: file.to_owned(),
                module: module.to_owned(),
                name: name(&tokens),
                is_impl: keyword.is_some_and(|word| word == "impl"),
                tokens,
            });
        }
    }
}

/// Returns the attributes at the start of an item: their names and arguments.
fn attributes(tokens: &[TokenTree]) -> impl Iterator<Item = (String, String)> {
    let pairs = tokens.windows(2).filter_map(|pair| match pair {
        [TokenTree::Punct(punct), TokenTree::Group(group)]
            if punct.as_char() == '#' && group.delimiter() == Delimiter::Bracket =>
        {
            Some(group.stream())
        }
        _ => None,
    });
    pairs.map(|attribute| {
        let tokens: Vec<TokenTree> = attribute.into_iter().collect();
        let arguments = match tokens.get(1) {
            Some(TokenTree::Group(group)) => group.stream().to_string(),
            _ => String::new(),
        };
        (tokens[0].to_string(), arguments)
    })
}

/// Returns the names outside the groups of an item's tokens.
fn words(tokens: &[TokenTree]) -> impl Iterator<Item = String> {
    tokens.iter().filter_map(|token| match token {
        TokenTree::Ident(name) => Some(name.to_string()),
        _ => None,
    })
}

/// Returns the name of an item.
fn name(tokens: &[TokenTree]) -> Option<String> {
    let mut words = words(tokens).skip_while(|word| !KEYWORDS.contains(&word.as_str()));
    let keyword = words.next()?;
    match keyword.as_str() {
        "impl" => type_of_impl(tokens),
        // `const fn`
        "const" => words.find(|word| !["fn", "unsafe"].contains(&word.as_str())),
        _ => words.next(),
    }
}

/// Returns the name of the type of an `impl` block.
fn type_of_impl(tokens: &[TokenTree]) -> Option<String> {
    let is = |token: &TokenTree, word: &str| token.to_string() == word;
    let start = tokens.iter().position(|token| is(token, "impl"))? + 1;
    let mut header = tokens.get(start..)?;
    // The parameters of the block.
    if header.first().is_some_and(|token| is(token, "<")) {
        let mut depth = 0;
        let end = header.iter().position(|token| {
            depth += i32::from(is(token, "<")) - i32::from(is(token, ">"));
            depth == 0
        })?;
        header = &header[end..];
    }
    if let Some(at) = header.iter().position(|token| is(token, "for")) {
        header = &header[at..];
    }
    words(header).find(|word| word.starts_with(char::is_uppercase))
}

/// Returns the names that an item uses of other items: types, traits, constants and functions, and
/// the first parts of paths (`name::`). Names after a dot are methods and fields; names after a type
/// are parts of the type.
fn used(item: &Item) -> BTreeSet<String> {
    let (mut names, mut own) = (BTreeSet::new(), BTreeSet::new());
    add_used(&item.tokens, &mut names, &mut own);
    if words(&item.tokens).any(|word| word == "enum") {
        own.extend(variants(&item.tokens));
    }
    names.retain(|name| {
        let plain = name.trim_end_matches(':');
        !own.contains(plain) && Some(plain) != item.name.as_deref()
    });
    names
}

/// Adds the names in `tokens` to `names`, and those that are defined there to `own`.
fn add_used(tokens: &[TokenTree], names: &mut BTreeSet<String>, own: &mut BTreeSet<String>) {
    let is = |at: Option<usize>, sign: char| matches!(at.and_then(|at| tokens.get(at)), Some(TokenTree::Punct(punct)) if punct.as_char() == sign);
    let word = |at: Option<usize>| match at.and_then(|at| tokens.get(at)) {
        Some(TokenTree::Ident(name)) => Some(name.to_string()),
        _ => None,
    };
    for (at, token) in tokens.iter().enumerate() {
        let name = match token {
            TokenTree::Group(group) => {
                let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                add_used(&inner, names, own);
                continue;
            }
            TokenTree::Ident(name) => name.to_string(),
            _ => continue,
        };
        let before = |count: usize| at.checked_sub(count);
        let is_path = |at: usize| is(Some(at), ':') && is(Some(at + 1), ':');
        let is_upper = |name: &str| name.starts_with(char::is_uppercase);
        if ["let", "mut", "fn", "const"].contains(&word(before(1)).unwrap_or_default().as_str())
            || is(Some(at + 1), ':') && !is(Some(at + 2), ':')
        {
            own.insert(name);
            continue;
        }
        let is_member = is(before(1), '.') && !is(before(2), '.');
        let is_part = before(2).is_some_and(is_path)
            && word(before(3)).is_none_or(|qualifier| is_upper(&qualifier));
        if is_member || is_part {
            continue;
        }
        let is_called = matches!(tokens.get(at + 1), Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Parenthesis);
        if is_path(at + 1) {
            names.insert(format!("{name}::"));
        } else if is_called || is_upper(&name) {
            names.insert(name);
        }
    }
}

/// Returns the names of the variants of an enum.
fn variants(tokens: &[TokenTree]) -> Vec<String> {
    let Some(TokenTree::Group(body)) = tokens.last() else {
        return Vec::new();
    };
    let body: Vec<TokenTree> = body.stream().into_iter().collect();
    words(&body).collect()
}

/// Returns the name of the type that a kernel's function defines.
fn type_name(function: &str) -> String {
    let capitalised = |word: &str| {
        let (first, rest) = word.split_at(word.len().min(1));
        first.to_uppercase() + rest
    };
    function.split('_').map(capitalised).collect()
}

#[test]
fn every_item_that_a_kernel_names_is_in_its_digest() -> Result<()> {
    let (sources, items) = (workspace(root())?, items()?);
    let mut named: BTreeMap<&str, Vec<&Item>> = BTreeMap::new();
    for item in items.iter().filter(|item| !item.is_impl) {
        if let Some(name) = &item.name {
            named.entry(name).or_default().push(item);
        }
    }
    let modules: BTreeSet<&str> = items
        .iter()
        .flat_map(|item| item.module.split("::"))
        .collect();
    // A kernel defines a type of its name.
    let kernels: BTreeSet<String> = items
        .iter()
        .filter(|item| item.is_kernel())
        .filter_map(|item| item.name.as_deref().map(type_name))
        .collect();
    named.retain(|name, _| !kernels.contains(*name));
    let mut missing = BTreeSet::new();
    for routine in Routine::ALL {
        let reached = routine.sources(&sources)?;
        let (names, mut checked) = (reached.names(), 0);
        // A digest has all blocks of a type, wherever they are.
        let is_of_reached = |item: &Item| {
            let types = item.name.as_deref().and_then(|name| named.get(name));
            let visible = |types: &Vec<&Item>| {
                let mut types = types
                    .iter()
                    .filter(|other| other.is_visible_to(item))
                    .peekable();
                types.peek().is_some()
                    && types.all(|other| other.is_reached(&names) && !other.is_error())
            };
            types.is_some_and(visible)
        };
        let has_text = |item: &&Item| match item.is_impl {
            true => is_of_reached(item),
            false => item.is_reached(&names) && !item.is_error(),
        };
        for item in items.iter().filter(has_text) {
            for name in used(item) {
                let plain = match name.strip_suffix("::") {
                    Some(module) if modules.contains(module) => continue,
                    Some(plain) => plain,
                    None => &name,
                };
                let derived_from = DERIVED.iter().find_map(|end| plain.strip_suffix(end));
                let found = named.get(plain).or_else(|| named.get(derived_from?));
                let mut of_name: Vec<&Item> = found.cloned().unwrap_or_default();
                of_name.retain(|other| other.is_visible_to(item));
                checked += of_name.len().min(1);
                if of_name.is_empty() || of_name.iter().any(|other| other.is_reached(&names)) {
                    continue;
                }
                let files = of_name.iter().map(|other| other.file.display().to_string());
                missing.insert(format!(
                    "{}: {} names `{name}`, and no item of that name in {} is in the digest",
                    routine.name(),
                    item.path().unwrap_or_else(|| item.module.clone()),
                    files.collect::<Vec<_>>().join(", ")
                ));
            }
        }
        let files = reached.files().len();
        println!(
            "{}: {checked} names of items in {files} files",
            routine.name()
        );
        assert!(
            checked > files,
            "{}: hardly a name was found",
            routine.name()
        );
    }
    assert!(missing.is_empty(), "{}", Vec::from_iter(missing).join("\n"));
    Ok(())
}

#[test]
fn every_kernel_is_of_a_routine_or_left_out() -> Result<()> {
    let (sources, items) = (workspace(root())?, items()?);
    let mut of_routines = BTreeSet::new();
    for routine in Routine::ALL {
        of_routines.extend(routine.sources(&sources)?.names());
    }
    let left_out = |item: &Item| {
        let of = |(module, _): &(&str, &str)| {
            format!("{}::", item.module).starts_with(&format!("{module}::"))
        };
        LEFT_OUT.iter().position(of)
    };
    let mut unused = BTreeSet::from_iter(LEFT_OUT.map(|(module, _)| module));
    for item in items.iter().filter(|item| item.is_kernel()) {
        let path = item.path().unwrap_or_default();
        match (item.is_reached(&of_routines), left_out(item)) {
            (true, None) => {}
            (false, Some(of)) => {
                unused.remove(LEFT_OUT[of].0);
            }
            (true, Some(of)) => panic!("{path} is of a routine; take it out of {:?}", LEFT_OUT[of]),
            (false, None) => panic!(
                "{path} is of no routine: add the function that makes its text to the roots of a \
                 routine in src/routine.rs, and its configurations to tests/sass; or list its \
                 module in LEFT_OUT"
            ),
        }
    }
    assert!(unused.is_empty(), "no kernel is in {unused:?}");
    Ok(())
}

#[test]
fn the_digest_of_a_step_has_every_kernel_of_it() -> Result<()> {
    let (sources, items) = (workspace(root())?, items()?);
    let step = step_sources(&sources)?.names();
    let mut expected = BTreeSet::new();
    for routine in Routine::ALL.into_iter().filter(|of| *of != Routine::Ladder) {
        expected.extend(routine.sources(&sources)?.names());
    }
    let is_of_step = |item: &&Item| {
        item.is_kernel()
            && (item.is_reached(&expected) || item.module.starts_with("marlin_nn::kernels"))
    };
    let kernels: Vec<&Item> = items.iter().filter(is_of_step).collect();
    assert!(
        kernels.len() > 20,
        "only {} kernels were found",
        kernels.len()
    );
    for kernel in kernels {
        assert!(
            kernel.is_reached(&step),
            "{}",
            kernel.path().unwrap_or_default()
        );
    }
    Ok(())
}

/// Checks that the digests have the files that earlier, hand-written lists lacked although kernels
/// used them.
#[test]
fn files_that_lists_by_hand_missed_are_in() -> Result<()> {
    let sources = workspace(root())?;
    let kernels = root().join("crates/marlin-kernels/src");
    for (routine, file) in [
        (Routine::Wgmma, "tile/cluster.rs"),
        (Routine::Wgmma, "ptx/cluster.rs"),
        (Routine::Wgmma, "ptx/griddepcontrol.rs"),
        (Routine::Gemv, "ptx/griddepcontrol.rs"),
        (Routine::Head, "planes.rs"),
        (Routine::Head, "pdl/mod.rs"),
    ] {
        let reached = routine.sources(&sources)?;
        assert!(
            reached.files().contains(kernels.join(file).as_path()),
            "{file} is not in the digest of {}",
            routine.name()
        );
    }
    Ok(())
}
