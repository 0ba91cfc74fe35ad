//! Layers of a target that not all of its readers take, or that some of them read wrong.
//!
//! What transformers and GPTQModel make of each form is measured: `benches/peers/readers.py` writes
//! all of them, opens them and compares logits. What vLLM refuses is from its sources.

use std::collections::HashMap;

use marlin_format::{GroupSize, QuantSpec, WeightValue};

use super::FileFormat;
use crate::ModelError;
use crate::config::ModelConfig;

/// What a layer is to its readers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// The output head.
    Head,
    /// A projection, or one of the layers that the format splits it into.
    Projection { is_split: bool },
    /// A feed-forward layer of a block without experts, in a mixture.
    DenseOfMixture,
    /// The float experts of a block in one tensor.
    FloatStack,
    /// A layer of an expert.
    Expert {
        /// True if the architecture's own files have all experts in one tensor.
        is_stacked: bool,
        /// True if the first expert of the model has other settings.
        differs: bool,
    },
}

/// A layer of the target, as its readers see it.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReadLayer {
    pub(super) role: Role,
    /// The number of input features.
    pub(super) k: usize,
    /// The spec; `None` for a layer that stays float.
    pub(super) spec: Option<QuantSpec>,
    /// True if the source's weight is bf16, in which transformers then runs the model.
    pub(super) is_bf16: bool,
}

/// A layer of an expert.
struct ExpertLayer {
    /// The number of the block.
    block: usize,
    is_down: bool,
    is_stacked: bool,
}

/// The settings of the experts that are planned so far.
#[derive(Default)]
pub(super) struct ExpertSettings {
    /// Those of a block's first gate or up (false), and of its first down (true).
    of_blocks: HashMap<(usize, bool), Option<QuantSpec>>,
    first: Option<Option<QuantSpec>>,
}

impl ExpertSettings {
    /// Returns the role of a layer of the target, and adds an expert's settings. The experts of a
    /// block have one matmul for all gates and ups, and one for all downs, each with one format;
    /// both are quantised, or both are float.
    ///
    /// # Errors
    /// [`ModelError::MixedExperts`] or [`ModelError::OtherExpert`] for an expert with other
    /// settings than those before it in its block.
    pub(super) fn role(
        &mut self,
        config: &ModelConfig,
        layer: &str,
        spec: Option<QuantSpec>,
        is_split: bool,
    ) -> Result<Role, ModelError> {
        let Some(expert) = expert_of(config, layer) else {
            return Ok(match config.experts.is_some() && is_dense(config, layer) {
                true => Role::DenseOfMixture,
                false => Role::Projection { is_split },
            });
        };
        let ExpertLayer { block, is_down, .. } = expert;
        let of_other = self.of_blocks.get(&(block, !is_down)).copied();
        let first = *self.of_blocks.entry((block, is_down)).or_insert(spec);
        let is_mixed = |known: Option<QuantSpec>| known.is_some() != spec.is_some();
        if is_mixed(first) || of_other.is_some_and(is_mixed) {
            return Err(ModelError::MixedExperts {
                layer: layer.into(),
            });
        }
        if let (Some(expected), Some(found)) = (first, spec)
            && expected != found
        {
            return Err(ModelError::OtherExpert {
                layer: layer.into(),
                expected: expected.to_string(),
                found: found.to_string(),
            });
        }
        Ok(Role::Expert {
            is_stacked: expert.is_stacked,
            differs: *self.first.get_or_insert(spec) != spec,
        })
    }
}

/// Returns the block of a layer and the layer's name in it.
fn block_of(layer: &str) -> Option<(usize, &str)> {
    let (block, name) = layer.strip_prefix("model.layers.")?.split_once('.')?;
    Some((block.parse().ok()?, name))
}

/// Returns true for a layer of the feed-forward network of a block without experts.
fn is_dense(config: &ModelConfig, layer: &str) -> bool {
    block_of(layer).is_some_and(|(block, name)| {
        config.block(block).experts().is_none() && name.starts_with("mlp.")
    })
}

/// Returns the expert that has a layer; `None` for a layer of another kind.
fn expert_of(config: &ModelConfig, layer: &str) -> Option<ExpertLayer> {
    let (block, name) = block_of(layer)?;
    let shape = config.block(block);
    let experts = shape.experts().filter(|experts| experts.has_layer(name))?;
    let [.., down] = experts.layers;
    Some(ExpertLayer {
        block,
        is_down: name.rsplit_once('.').is_some_and(|(_, name)| name == down),
        is_stacked: experts.stack.is_own,
    })
}

/// The reasons why some readers do not take the target, each with its first layer and the number
/// of its layers.
#[derive(Default)]
pub(super) struct Warnings(Vec<(&'static str, String, usize)>);

impl Warnings {
    /// Adds the reasons of a layer.
    pub(super) fn add(&mut self, layer: &str, reasons: Vec<&'static str>) {
        for reason in reasons {
            match self.0.iter_mut().find(|(known, ..)| *known == reason) {
                Some((.., layers)) => *layers += 1,
                None => self.0.push((reason, layer.into(), 1)),
            }
        }
    }

    /// Logs each reason.
    pub(super) fn log(self) {
        for (reason, layer, layers) in self.0 {
            tracing::warn!(%layer, layers, "not all readers will take the target: {reason}");
        }
    }
}

impl FileFormat {
    /// Returns the reasons why some readers of this format refuse a file with a layer, or read it
    /// wrong. `common` is the spec of layers that are not overridden.
    pub(super) fn reasons(
        self,
        layer: &ReadLayer,
        common: &QuantSpec,
        act_order: bool,
    ) -> Vec<&'static str> {
        match self {
            Self::CompressedTensors => of_compressed_tensors(layer, common),
            Self::Gptq => of_gptq(layer, common, act_order),
            Self::Marlin24 if layer.spec.is_some() => vec![
                "compressed-tensors from 0.15 on and vLLM read no marlin-24; compressed-tensors' default form holds the same weights with their zeros",
            ],
            Self::Marlin24 => Vec::new(),
        }
    }
}

/// Returns true if the groups of a spec do not divide K.
fn is_incomplete(spec: &QuantSpec, k: usize) -> bool {
    !k.is_multiple_of(spec.scales.group.rows(k))
}

fn of_compressed_tensors(layer: &ReadLayer, common: &QuantSpec) -> Vec<&'static str> {
    let is_expert = matches!(layer.role, Role::Expert { .. });
    let mut reasons = Vec::new();
    if let Role::Expert {
        is_stacked: true, ..
    } = layer.role
    {
        reasons.push(
            "transformers (5.24) has no place for experts of gpt-oss one by one, and computes with random ones, without an error",
        );
    }
    let Some(spec) = layer.spec else {
        if is_expert && common.value != WeightValue::E4m3 {
            reasons.push(
                "transformers (5.24) refuses experts that are excluded one by one beside layers that are not FP8",
            );
        }
        return reasons;
    };
    if is_incomplete(&spec, layer.k) {
        reasons.push(
            "compressed-tensors itself and vLLM refuse groups that do not divide K; the form GPTQ is read with them",
        );
    }
    match spec.has_zero_points() {
        true if is_expert => reasons.push("transformers (5.24) refuses experts with zero points"),
        true => reasons.push(
            "transformers (5.24) opens zero points only with `CompressedTensorsConfig(dequantize=True)`; vLLM reads them as they are",
        ),
        false => {}
    }
    if spec != *common && !is_expert {
        reasons.push(match common.has_zero_points() {
            true => {
                "transformers (5.24) refuses this file: it opens zero points only with `CompressedTensorsConfig(dequantize=True)`, which takes one setting for all layers"
            }
            false => {
                "transformers (5.24) reads layers of settings of their own, but not with `CompressedTensorsConfig(dequantize=True)`, which takes one setting for all layers, and may give wrong logits, without an error"
            }
        });
    }
    if spec.value == WeightValue::E2m1 && !layer.is_bf16 && !is_expert {
        reasons.push(
            "transformers (5.24) multiplies FP4 by bf16 alone, and this model is not bf16: open the target with `dtype=torch.bfloat16`",
        );
    }
    if is_expert && (spec.value, spec.scales.group) == (WeightValue::E2m1, GroupSize::G16) {
        reasons.push(
            "transformers (5.24) reads experts in NVFP4 without the scale of the whole weight, so that logits are wrong, without an error",
        );
    }
    if let Role::Expert { differs: true, .. } = layer.role {
        reasons.push(
            "transformers (5.24) has one setting for all experts, and refuses the others or reads them wrong, without an error",
        );
    }
    reasons
}

fn of_gptq(layer: &ReadLayer, common: &QuantSpec, act_order: bool) -> Vec<&'static str> {
    let mut reasons = Vec::new();
    match (layer.role, layer.spec) {
        (Role::Head, Some(_)) => reasons.push(
            "transformers (5.24) leaves out a quantised head in the form GPTQ, and computes with a random one, without an error; GPTQModel reads it",
        ),
        (Role::Expert { .. }, Some(_)) => reasons.push(
            "transformers (5.24) leaves out quantised experts in the form GPTQ, and computes with random ones, without an error; GPTQModel (7.7) reads those of Qwen's mixtures alone",
        ),
        (Role::FloatStack, _) => {
            return vec![
                "GPTQModel (7.7) reads no float experts in one tensor, and computes with random ones, without an error; transformers reads them",
            ];
        }
        (Role::DenseOfMixture, Some(_)) => reasons.push(
            "GPTQModel (7.7) leaves out the feed-forward layers of a mixture's blocks without experts, and computes with random ones, without an error",
        ),
        (Role::Projection { is_split: true }, Some(_)) => reasons.push(
            "transformers (5.24) leaves out `gate_proj` and `up_proj` of a Phi-3, and computes with random ones, without an error; GPTQModel reads them, and transformers reads the compressed-tensors form",
        ),
        _ => {}
    }
    if layer.role != Role::Head && layer.spec != Some(*common) {
        reasons.push(
            "transformers (5.24) reads no layers of settings of their own in the form GPTQ (`dynamic`); GPTQModel and vLLM do",
        );
    }
    let Some(spec) = layer.spec else {
        return reasons;
    };
    if act_order && layer.role != Role::Head && spec.scales.group.count(layer.k) > 1 {
        reasons.push("vLLM refuses act-order over groups; GPTQModel reads it");
    }
    if spec.has_zero_points() {
        reasons.push(
            "vLLM refuses zero points in the form GPTQ; GPTQModel reads them, and vLLM those of compressed-tensors",
        );
    }
    if is_incomplete(&spec, layer.k) {
        reasons.push("vLLM refuses groups that do not divide K; GPTQModel reads them");
    }
    reasons
}

#[cfg(test)]
mod tests {
    use marlin_format::{GroupSize, QuantSpec};

    use super::{ReadLayer, Role};
    use crate::FileFormat::{self, CompressedTensors, Gptq, Marlin24};

    const COMMON: QuantSpec = QuantSpec::int4(GroupSize::G128);
    const PROJECTION: Role = Role::Projection { is_split: false };
    const EXPERT: Role = expert(false, false);
    /// What is said of forms that are read as random weights, or as wrong ones.
    const SILENT: &str = "without an error";

    const fn expert(is_stacked: bool, differs: bool) -> Role {
        Role::Expert {
            is_stacked,
            differs,
        }
    }

    /// Returns all reasons for a layer of 256 input features in a model of bf16.
    fn reasons(
        format: FileFormat,
        role: Role,
        spec: impl Into<Option<QuantSpec>>,
        common: QuantSpec,
    ) -> String {
        let layer = ReadLayer {
            role,
            k: 256,
            spec: spec.into(),
            is_bf16: true,
        };
        format.reasons(&layer, &common, false).join("; ")
    }

    #[test]
    fn forms_that_all_readers_take_need_no_warning() {
        for (format, role, spec, common) in [
            (CompressedTensors, PROJECTION, Some(COMMON), COMMON),
            (CompressedTensors, PROJECTION, None, COMMON),
            (CompressedTensors, Role::Head, Some(COMMON), COMMON),
            (CompressedTensors, EXPERT, Some(COMMON), COMMON),
            (
                CompressedTensors,
                EXPERT,
                Some(QuantSpec::mxfp4()),
                QuantSpec::fp8(),
            ),
            (CompressedTensors, EXPERT, None, QuantSpec::fp8()),
            (
                CompressedTensors,
                PROJECTION,
                Some(QuantSpec::nvfp4()),
                QuantSpec::nvfp4(),
            ),
            (Gptq, PROJECTION, Some(COMMON), COMMON),
            (CompressedTensors, Role::FloatStack, None, COMMON),
            (Marlin24, PROJECTION, None, COMMON),
        ] {
            assert_eq!(
                reasons(format, role, spec, common),
                "",
                "{format:?} {role:?} {spec:?}"
            );
        }
    }

    #[test]
    fn forms_that_some_readers_refuse_or_read_wrong_are_named() {
        let asymmetric = COMMON.with_zero_points();
        let (int8, nvfp4) = (QuantSpec::int8(GroupSize::G128), QuantSpec::nvfp4());
        let split = Role::Projection { is_split: true };
        for (format, role, spec, common, words) in [
            (
                CompressedTensors,
                Role::Head,
                Some(int8),
                COMMON,
                ["dequantize=True", SILENT],
            ),
            (
                CompressedTensors,
                PROJECTION,
                Some(asymmetric),
                asymmetric,
                ["zero points", "only with"],
            ),
            (
                CompressedTensors,
                Role::Head,
                Some(int8),
                asymmetric,
                ["zero points", "one setting for all"],
            ),
            (
                CompressedTensors,
                EXPERT,
                Some(asymmetric),
                asymmetric,
                ["refuses", "experts with zero points"],
            ),
            (
                CompressedTensors,
                EXPERT,
                None,
                COMMON,
                ["refuses", "excluded"],
            ),
            (
                CompressedTensors,
                EXPERT,
                Some(nvfp4),
                nvfp4,
                ["NVFP4", SILENT],
            ),
            (
                CompressedTensors,
                expert(false, true),
                Some(int8),
                COMMON,
                ["one setting", SILENT],
            ),
            (
                CompressedTensors,
                expert(true, false),
                Some(COMMON),
                COMMON,
                ["gpt-oss", SILENT],
            ),
            (Gptq, Role::Head, Some(int8), COMMON, ["head", SILENT]),
            (Gptq, EXPERT, Some(COMMON), COMMON, ["experts", SILENT]),
            (Gptq, split, Some(COMMON), COMMON, ["Phi-3", SILENT]),
            (
                Gptq,
                Role::DenseOfMixture,
                Some(COMMON),
                COMMON,
                ["GPTQModel", SILENT],
            ),
            (Gptq, Role::FloatStack, None, COMMON, ["GPTQModel", SILENT]),
            (
                Gptq,
                PROJECTION,
                Some(int8),
                COMMON,
                ["`dynamic`", "GPTQModel"],
            ),
            (Gptq, PROJECTION, None, COMMON, ["`dynamic`", "GPTQModel"]),
            (
                Gptq,
                PROJECTION,
                Some(asymmetric),
                asymmetric,
                ["vLLM", "zero points"],
            ),
            (
                Marlin24,
                PROJECTION,
                Some(COMMON),
                COMMON,
                ["0.15", "marlin-24"],
            ),
        ] {
            let found = reasons(format, role, spec, common);
            for word in words {
                assert!(
                    found.contains(word),
                    "{format:?} {role:?} {spec:?}: {found}"
                );
            }
        }
    }

    #[test]
    fn groups_dtypes_and_orders_count() {
        let layer = |role, k, spec| ReadLayer {
            role,
            k,
            spec: Some(spec),
            is_bf16: false,
        };
        let small = layer(Role::Head, 64, COMMON);
        let [of_tensors] = CompressedTensors.reasons(&small, &COMMON, false)[..] else {
            panic!("one reason")
        };
        assert!(of_tensors.contains("do not divide K"), "{of_tensors}");
        for spec in [QuantSpec::mxfp4(), QuantSpec::nvfp4()] {
            let found = CompressedTensors.reasons(&layer(PROJECTION, 256, spec), &spec, false);
            assert!(found.concat().contains("not bf16"), "{found:?}");
        }
        for (role, is_ordered) in [(PROJECTION, true), (Role::Head, false)] {
            let found = Gptq.reasons(&layer(role, 256, COMMON), &COMMON, true);
            assert_eq!(
                found.concat().contains("act-order"),
                is_ordered,
                "{found:?}"
            );
        }
    }
}
