//! Modules and their items, read from files.

use crate::tokens::{paths, plain, without_docs};
use crate::{Error, Sources};
use proc_macro2::TokenStream;
use quote::ToTokens;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use syn::{Attribute, Item as Syntax, UseTree};

/// A module: a whole file, or an inline module in a file.
#[derive(Debug)]
pub struct Module {
    /// The path of the module, starting with the name of the crate.
    pub path: String,
    /// The file that contains the module.
    pub file: PathBuf,
    /// The index of the parent module.
    pub parent: Option<usize>,
    /// The indices of the child modules, by name.
    pub children: BTreeMap<String, usize>,
    /// The indices of the module's items, by each of their names.
    pub items: BTreeMap<String, Vec<usize>>,
    /// The names that `use` imports, and the paths that they stand for.
    pub imports: Vec<(String, Vec<String>)>,
    /// The paths of `use path::*`.
    pub globs: Vec<Vec<String>>,
    /// The indices of the traits of the module.
    pub traits: Vec<usize>,
}

/// An item other than a module or a `use`.
#[derive(Debug)]
pub struct Item {
    /// The index of the module that contains the item.
    pub module: usize,
    /// The names of the item. A macro call has all names in it, because it may define any of them.
    /// `impl` blocks and macro definitions have no names here.
    pub names: Vec<String>,
    /// The tokens of the item without documentation and lints, as text; empty for a type of errors.
    pub text: String,
    /// The paths in the item.
    pub paths: Vec<Vec<String>>,
    /// The paths in the type and in the trait of an `impl` block; `None` for other items.
    pub of: Option<[Vec<Vec<String>>; 2]>,
}

impl Sources {
    /// Reads the crate whose root module is in `file`, and returns the index of that module.
    pub(crate) fn read_crate(&mut self, name: &str, file: &Path) -> Result<usize, Error> {
        self.read_file(
            name.to_owned(),
            file.to_path_buf(),
            file.parent().unwrap_or(Path::new(".")),
            None,
        )
    }

    /// Reads the module in a file. Child modules are files in `folder`.
    fn read_file(
        &mut self,
        path: String,
        file: PathBuf,
        folder: &Path,
        parent: Option<usize>,
    ) -> Result<usize, Error> {
        let text = fs::read_to_string(&file).map_err(|source| Error::File {
            path: file.clone(),
            source,
        })?;
        let syntax = syn::parse_file(&text).map_err(|source| Error::Parse {
            path: file.clone(),
            source,
        })?;
        self.read_module(path, file, folder, parent, syntax.items)
    }

    fn read_module(
        &mut self,
        path: String,
        file: PathBuf,
        folder: &Path,
        parent: Option<usize>,
        syntax: Vec<Syntax>,
    ) -> Result<usize, Error> {
        let module = self.modules.len();
        let (children, items) = Default::default();
        let (imports, globs, traits) = Default::default();
        self.modules.push(Module {
            path: path.clone(),
            file: file.clone(),
            parent,
            children,
            items,
            imports,
            globs,
            traits,
        });
        for item in syntax {
            match item {
                Syntax::Mod(item) if !is_test(&item.attrs) => {
                    let name = plain(&item.ident);
                    let (path, inner) = (format!("{path}::{name}"), folder.join(&name));
                    let child = match item.content {
                        Some((_, items)) => {
                            self.read_module(path, file.clone(), &inner, Some(module), items)?
                        }
                        None => {
                            let places = [folder.join(format!("{name}.rs")), inner.join("mod.rs")];
                            let Some(found) = places.into_iter().find(|place| place.exists())
                            else {
                                return Err(Error::NoModule {
                                    path: file,
                                    module: name,
                                });
                            };
                            self.read_file(path, found, &inner, Some(module))?
                        }
                    };
                    self.modules[module].children.insert(name, child);
                }
                Syntax::Use(item) if !is_test(&item.attrs) => {
                    self.add_use(module, Vec::new(), &item.tree)
                }
                Syntax::Mod(_) | Syntax::Use(_) => (),
                item => self.add_item(module, item),
            }
        }
        Ok(module)
    }

    fn add_use(&mut self, module: usize, mut path: Vec<String>, tree: &UseTree) {
        match tree {
            UseTree::Path(tree) => {
                path.push(plain(&tree.ident));
                self.add_use(module, path, &tree.tree);
            }
            UseTree::Name(tree) if tree.ident == "self" => {
                let name = path.last().cloned().unwrap_or_default();
                self.modules[module].imports.push((name, path));
            }
            UseTree::Name(tree) => {
                let name = plain(&tree.ident);
                path.push(name.clone());
                self.modules[module].imports.push((name, path));
            }
            UseTree::Rename(tree) => {
                if tree.ident != "self" {
                    path.push(plain(&tree.ident));
                }
                self.modules[module]
                    .imports
                    .push((plain(&tree.rename), path));
            }
            UseTree::Glob(_) => self.modules[module].globs.push(path),
            UseTree::Group(tree) => tree
                .items
                .iter()
                .for_each(|tree| self.add_use(module, path.clone(), tree)),
        }
    }

    fn add_item(&mut self, module: usize, syntax: Syntax) {
        let (attributes, mut names, mut of) = (attributes(&syntax), Vec::new(), None);
        if is_test(attributes) {
            return;
        }
        // No error decides what a kernel is.
        let tokens = match is_error(attributes) {
            true => TokenStream::new(),
            false => without_docs(syntax.to_token_stream()),
        };
        let found = paths(tokens.clone());
        let id = self.items.len();
        match &syntax {
            Syntax::Impl(item) => {
                let of_trait = item
                    .trait_
                    .as_ref()
                    .map(|(path, _)| paths(path.to_token_stream()));
                of = Some([
                    paths(item.self_ty.to_token_stream()),
                    of_trait.unwrap_or_default(),
                ]);
            }
            Syntax::Macro(item) => match &item.ident {
                Some(name) => self.macros.entry(plain(name)).or_default().push(id),
                None => names.extend(found.iter().flatten().cloned()),
            },
            Syntax::Const(item) => names.push(plain(&item.ident)),
            Syntax::Enum(item) => names.push(plain(&item.ident)),
            Syntax::Fn(item) => names.push(plain(&item.sig.ident)),
            Syntax::Static(item) => names.push(plain(&item.ident)),
            Syntax::Struct(item) => names.push(plain(&item.ident)),
            Syntax::Trait(item) => {
                names.push(plain(&item.ident));
                self.modules[module].traits.push(id);
            }
            Syntax::TraitAlias(item) => names.push(plain(&item.ident)),
            Syntax::Type(item) => names.push(plain(&item.ident)),
            Syntax::Union(item) => names.push(plain(&item.ident)),
            // Items of another language, or unknown to the parser, may define any name that occurs
            // in the item.
            _ => names.extend(found.iter().flatten().cloned()),
        }
        for name in &names {
            self.modules[module]
                .items
                .entry(name.clone())
                .or_default()
                .push(id);
        }
        self.items.push(Item {
            module,
            names,
            text: tokens.to_string(),
            paths: found,
            of,
        });
    }
}

fn attributes(item: &Syntax) -> &[Attribute] {
    match item {
        Syntax::Const(item) => &item.attrs,
        Syntax::Enum(item) => &item.attrs,
        Syntax::Fn(item) => &item.attrs,
        Syntax::Impl(item) => &item.attrs,
        Syntax::Macro(item) => &item.attrs,
        Syntax::Static(item) => &item.attrs,
        Syntax::Struct(item) => &item.attrs,
        Syntax::Trait(item) => &item.attrs,
        Syntax::Type(item) => &item.attrs,
        _ => &[],
    }
}

/// Returns true for a type that derives `Error` of thiserror.
fn is_error(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let derived = paths(attribute.meta.to_token_stream());
        attribute.path().is_ident("derive")
            && derived
                .iter()
                .any(|path| path.last().is_some_and(|name| name == "Error"))
    })
}

/// Returns true for `#[cfg(test)]` and `#[test]`.
fn is_test(attributes: &[Attribute]) -> bool {
    let is_test = |attribute: &Attribute| {
        let names = paths(attribute.meta.to_token_stream());
        let has = |name: &str| names.iter().any(|path| path.len() == 1 && path[0] == name);
        attribute.path().is_ident("test")
            || attribute.path().is_ident("cfg") && has("test") && !has("not")
    };
    attributes.iter().any(is_test)
}
