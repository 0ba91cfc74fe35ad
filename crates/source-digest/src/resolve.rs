//! Resolution of paths to items and modules.

use crate::Sources;

/// The suffixes that `#[derive(CubeType)]` and `#[cube(launch)]` append to the name of an item to
/// name the items that they define.
const DERIVED: [&str; 3] = ["CompilationArg", "Expand", "Launch"];
/// The maximum depth of imports through imports: a longer chain is a cycle.
const MAX_DEPTH: usize = 16;

/// A module or an item that a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Definition {
    Module(usize),
    Item(usize),
}

impl Sources {
    /// Returns the items that an item names, and the traits in its scope, because a method call
    /// does not name its trait.
    pub(crate) fn named_by(&self, item: usize) -> Vec<usize> {
        let item = &self.items[item];
        let traits = self.traits_in(item.module);
        let macros = |path: &Vec<String>| {
            path.last()
                .and_then(|name| self.macros.get(name))
                .into_iter()
                .flatten()
                .copied()
        };
        item.paths
            .iter()
            .flat_map(|path| {
                self.items_of(item.module, path)
                    .into_iter()
                    .chain(macros(path))
            })
            .chain(traits)
            .collect()
    }

    /// Returns the traits that are defined in a module or imported there.
    fn traits_in(&self, module: usize) -> Vec<usize> {
        let of = &self.modules[module];
        let is_trait = |item: &usize| self.modules[self.items[*item].module].traits.contains(item);
        let imported = of
            .imports
            .iter()
            .flat_map(|(_, path)| self.items_of(module, path))
            .filter(is_trait);
        let globs = of
            .globs
            .iter()
            .flat_map(|path| self.resolve(module, path, 0))
            .flat_map(|definition| match definition {
                Definition::Module(other) => self.modules[other].traits.clone(),
                Definition::Item(_) => Vec::new(),
            });
        of.traits
            .iter()
            .copied()
            .chain(imported)
            .chain(globs)
            .collect()
    }

    /// Returns the items of a root: the item of that path, or all items of the module and of its
    /// child modules.
    pub(crate) fn items_of_root(&self, root: &str) -> Vec<usize> {
        let path: Vec<String> = root.split("::").map(str::to_owned).collect();
        let Some((name, rest)) = path.split_first() else {
            return Vec::new();
        };
        let Some(&start) = self.crates.get(name) else {
            return Vec::new();
        };
        let definitions = self.follow(vec![Definition::Module(start)], rest, 0);
        let of = |definition| match definition {
            Definition::Item(item) => vec![item],
            Definition::Module(module) => self.items_in(module),
        };
        // If a function and a module have the same name, only the function is the root.
        let has_item = definitions
            .iter()
            .any(|definition| matches!(definition, Definition::Item(_)));
        definitions
            .into_iter()
            .filter(|definition| !has_item || matches!(definition, Definition::Item(_)))
            .flat_map(of)
            .collect()
    }

    /// Finds the types of all `impl` blocks. For types of other crates, the traits are used
    /// instead.
    pub(crate) fn find_impls(&mut self) {
        for id in 0..self.items.len() {
            let item = &self.items[id];
            let Some(of) = &item.of else { continue };
            let owners = |paths: &[Vec<String>]| -> Vec<usize> {
                paths
                    .iter()
                    .flat_map(|path| self.items_of(item.module, path))
                    .collect()
            };
            let [of_type, of_trait] = [owners(&of[0]), owners(&of[1])];
            for owner in if of_type.is_empty() {
                of_trait
            } else {
                of_type
            } {
                self.impls.entry(owner).or_default().push(id);
            }
        }
    }

    fn items_in(&self, module: usize) -> Vec<usize> {
        let is_in = |mut other: usize| loop {
            if other == module {
                return true;
            }
            match self.modules[other].parent {
                Some(parent) => other = parent,
                None => return false,
            }
        };
        (0..self.items.len())
            .filter(|&item| is_in(self.items[item].module))
            .collect()
    }

    fn items_of(&self, module: usize, path: &[String]) -> Vec<usize> {
        let items = self
            .resolve(module, path, 0)
            .into_iter()
            .filter_map(|definition| match definition {
                Definition::Item(item) => Some(item),
                Definition::Module(_) => None,
            });
        items.collect()
    }

    /// Returns the definitions that a path stands for in a module.
    fn resolve(&self, module: usize, path: &[String], depth: usize) -> Vec<Definition> {
        let Some((name, rest)) = path.split_first().filter(|_| depth < MAX_DEPTH) else {
            return Vec::new();
        };
        let mut start = match name.as_str() {
            "crate" => vec![Definition::Module(self.root_of(module))],
            "self" => vec![Definition::Module(module)],
            "super" => self.modules[module]
                .parent
                .map(Definition::Module)
                .into_iter()
                .collect(),
            name => self.lookup(module, name, depth),
        };
        if start.is_empty() {
            start.extend(self.crates.get(name).copied().map(Definition::Module));
        }
        self.follow(start, rest, depth)
    }

    /// Follows the rest of a path. A name after an item is a part of the item: a variant or an
    /// associated function. If the name before it stands for a module and for an item, only the
    /// module is followed: the item is a function, which has no parts.
    fn follow(
        &self,
        mut definitions: Vec<Definition>,
        rest: &[String],
        depth: usize,
    ) -> Vec<Definition> {
        for name in rest {
            let is_module = |definition: &Definition| matches!(definition, Definition::Module(_));
            if definitions.iter().any(is_module) {
                definitions.retain(is_module);
            }
            let next = |definition| match definition {
                Definition::Item(item) => vec![Definition::Item(item)],
                Definition::Module(module) if name == "super" => self.modules[module]
                    .parent
                    .map(Definition::Module)
                    .into_iter()
                    .collect(),
                Definition::Module(module) => self.lookup(module, name, depth + 1),
            };
            definitions = definitions.into_iter().flat_map(next).collect();
        }
        definitions
    }

    /// Returns the definitions that a name stands for in a module. Definitions in the module and
    /// imports by name take precedence over imports by `*`.
    fn lookup(&self, module: usize, name: &str, depth: usize) -> Vec<Definition> {
        if depth >= MAX_DEPTH {
            return Vec::new();
        }
        let Some(of) = self.modules.get(module) else {
            return Vec::new();
        };
        let mut found: Vec<Definition> = of
            .children
            .get(name)
            .copied()
            .map(Definition::Module)
            .into_iter()
            .collect();
        found.extend(
            of.items
                .get(name)
                .into_iter()
                .flatten()
                .copied()
                .map(Definition::Item),
        );
        for (_, path) in of.imports.iter().filter(|(alias, path)| {
            alias == name && (path.len() > 1 || path.first() != Some(alias))
        }) {
            found.extend(self.resolve(module, path, depth + 1));
        }
        if found.is_empty() {
            for path in &of.globs {
                for definition in self.resolve(module, path, depth + 1) {
                    if let Definition::Module(other) = definition
                        && other != module
                    {
                        found.extend(self.lookup(other, name, depth + 1));
                    }
                }
            }
        }
        if found.is_empty() {
            let derived = DERIVED
                .iter()
                .filter_map(|ending| name.strip_suffix(ending));
            found.extend(
                derived
                    .filter(|name| !name.is_empty())
                    .flat_map(|name| self.lookup(module, name, depth + 1)),
            );
        }
        found
    }

    fn root_of(&self, mut module: usize) -> usize {
        while let Some(parent) = self.modules[module].parent {
            module = parent;
        }
        module
    }
}
