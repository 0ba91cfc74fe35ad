//! Compact lists of layers: consecutive layers with equal descriptions become one entry.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;

/// A run of layers with one description, whose paths differ only in consecutive numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerRun<T> {
    /// The common path, with the first and the last number: `model.layers.0..31.mlp.down_proj` is
    /// 32 layers, both ends included.
    pub path: String,
    /// The number of layers.
    pub count: usize,
    /// The description that all layers of the run share.
    pub description: T,
}

/// Folds layers with equal descriptions and consecutive numbers in their paths into runs.
///
/// A number is a whole component of a path: `layers.2.mlp` contains one, `layer2.mlp` contains
/// none. In paths with several numbers, the last number is folded first, so that all experts of all
/// layers of a model become one run. Runs are in the order of their first layers.
///
/// ```
/// use marlin_format::fold_layers;
///
/// let layers = [("layers.0.up", "int4"), ("layers.0.down", "int8"), ("layers.1.up", "int4"), ("layers.1.down", "int4"), ("head", "f16")];
/// let runs = fold_layers(layers.map(|(path, format)| (path.to_string(), format)));
/// let paths: Vec<&str> = runs.iter().map(|run| run.path.as_str()).collect();
/// assert_eq!(paths, ["layers.0..1.up", "layers.0.down", "layers.1.down", "head"]);
/// assert_eq!((runs[0].count, runs[0].description), (2, "int4"));
/// ```
pub fn fold_layers<T: Clone + Eq + Hash>(
    layers: impl IntoIterator<Item = (String, T)>,
) -> Vec<LayerRun<T>> {
    let mut runs: Vec<Option<Run<T>>> = layers
        .into_iter()
        .map(|(path, description)| Some(Run::of(&path, description)))
        .collect();
    let depth = runs
        .iter()
        .flatten()
        .map(|run| run.path.len())
        .max()
        .unwrap_or(0);
    for position in (0..depth).rev() {
        fold_at(&mut runs, position);
    }
    runs.into_iter().flatten().map(Run::finish).collect()
}

/// A run under construction.
struct Run<T> {
    path: Vec<Component>,
    count: usize,
    description: T,
}

/// One component of a path, between two dots.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Component {
    Text(String),
    Number(u64),
    Range(u64, u64),
    /// A placeholder for any number, in the key of a run.
    Any,
}

impl Component {
    fn of(text: &str) -> Self {
        // Only canonical numbers count: `007` would be printed as `7`, which is another name.
        text.parse()
            .ok()
            .filter(|number: &u64| number.to_string() == text)
            .map_or_else(|| Self::Text(text.into()), Self::Number)
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Number(number) => write!(f, "{number}"),
            Self::Range(first, last) => write!(f, "{first}..{last}"),
            Self::Any => f.write_str("*"),
        }
    }
}

impl<T: Clone> Run<T> {
    fn of(path: &str, description: T) -> Self {
        Self {
            path: path.split('.').map(Component::of).collect(),
            count: 1,
            description,
        }
    }

    fn finish(self) -> LayerRun<T> {
        let path = self
            .path
            .iter()
            .map(Component::to_string)
            .collect::<Vec<_>>()
            .join(".");
        LayerRun {
            path,
            count: self.count,
            description: self.description,
        }
    }

    /// Returns the path and description of a run without the number at `position`, and that number.
    /// Returns `None` if the component at `position` is not a number.
    fn key(&self, position: usize) -> Option<((Vec<Component>, T), u64)> {
        let &Component::Number(number) = self.path.get(position)? else {
            return None;
        };
        let mut path = self.path.clone();
        path[position] = Component::Any;
        Some(((path, self.description.clone()), number))
    }
}

/// Folds runs that differ only in the number at `position`. The earliest run of the list stays and
/// represents the others, which become `None`.
fn fold_at<T: Clone + Eq + Hash>(runs: &mut [Option<Run<T>>], position: usize) {
    let mut alike: HashMap<_, Vec<(u64, usize)>> = HashMap::new();
    for (index, run) in runs.iter().enumerate() {
        if let Some((key, number)) = run.as_ref().and_then(|run| run.key(position)) {
            alike.entry(key).or_default().push((number, index));
        }
    }
    for mut members in alike.into_values() {
        members.sort_unstable();
        for members in
            members.chunk_by(|(before, _), (after, _)| before.checked_add(1) == Some(*after))
        {
            let [(first, _), .., (last, _)] = members else {
                continue;
            };
            let count = members
                .iter()
                .filter_map(|&(_, index)| runs[index].as_ref())
                .map(|run| run.count)
                .sum();
            // In a list sorted by name, layer 10 comes before layer 2.
            let place = members.iter().map(|&(_, index)| index).min();
            for &(_, index) in members {
                if Some(index) != place {
                    runs[index] = None;
                } else if let Some(run) = &mut runs[index] {
                    run.path[position] = Component::Range(*first, *last);
                    run.count = count;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::fold_layers;

    /// Returns the folded runs as text, in the form `path xcount description`.
    fn folded(layers: &[(&str, &str)]) -> Vec<String> {
        let runs = fold_layers(
            layers
                .iter()
                .map(|&(path, description)| (path.to_string(), description)),
        );
        runs.iter()
            .map(|run| format!("{} x{} {}", run.path, run.count, run.description))
            .collect()
    }

    #[test]
    fn equal_neighbours_fold_whatever_their_order() {
        // The order of a list sorted by name.
        let layers = ["0", "1", "10", "11", "2", "3", "4", "5", "6", "7", "8", "9"]
            .map(|layer| format!("model.layers.{layer}.down"));
        let layers: Vec<(&str, &str)> = layers
            .iter()
            .map(|layer| (layer.as_str(), "int4"))
            .collect();
        assert_eq!(folded(&layers), ["model.layers.0..11.down x12 int4"]);
    }

    #[test]
    fn another_description_or_a_gap_ends_a_run() {
        let layers = [
            ("h.0", "int8"),
            ("h.1", "int4"),
            ("h.2", "int4"),
            ("h.3", "int8"),
            ("h.4", "int8"),
            ("h.7", "int8"),
        ];
        assert_eq!(
            folded(&layers),
            [
                "h.0 x1 int8",
                "h.1..2 x2 int4",
                "h.3..4 x2 int8",
                "h.7 x1 int8"
            ]
        );
    }

    #[test]
    fn paths_fold_along_each_of_their_numbers() {
        let mut layers = Vec::new();
        for layer in 0..3 {
            for expert in 0..4 {
                layers.push((
                    format!("layers.{layer}.experts.{expert}.up"),
                    if layer == 2 && expert == 3 {
                        "f16"
                    } else {
                        "int4"
                    },
                ));
            }
        }
        let layers: Vec<(&str, &str)> = layers
            .iter()
            .map(|(path, description)| (path.as_str(), *description))
            .collect();
        let expected = [
            "layers.0..1.experts.0..3.up x8 int4",
            "layers.2.experts.0..2.up x3 int4",
            "layers.2.experts.3.up x1 f16",
        ];
        assert_eq!(folded(&layers), expected);
    }

    #[test]
    fn paths_that_differ_elsewhere_stay_apart() {
        let layers = [
            ("a.0.b", "f16"),
            ("a.1.c", "f16"),
            ("a.2", "f16"),
            ("a.03", "f16"),
            ("a3", "f16"),
            ("a.x", "f16"),
            ("", "f16"),
            ("a.3.b", "f16"),
        ];
        assert_eq!(
            folded(&layers),
            layers.map(|(path, description)| format!("{path} x1 {description}"))
        );
    }

    #[test]
    fn a_path_that_comes_twice_is_not_folded_with_itself() {
        assert_eq!(
            folded(&[("h.0", "int4"), ("h.0", "int4")]),
            ["h.0 x1 int4", "h.0 x1 int4"]
        );
        assert_eq!(
            folded(&[("h.18446744073709551615", "int4"), ("h.0", "int4")]).len(),
            2
        );
    }
}
