//! The quantisation of every layer according to the configs of a folder, independent of the program
//! that wrote the configs.
//!
//! | `quant_method` | read by |
//! |---|---|
//! | `gptq`, `awq`, and in older files `marlin` | [`gptq`] |
//! | `compressed-tensors` | [`compressed_tensors`] |
//! | `auto-round` | [`auto_round`] |
//! | `fp8`, `fbgemm_fp8` | [`fp8`] |
//! | `modelopt`, `modelopt_fp4` | [`modelopt`] |
//! | `mxfp4` | [`mxfp4`] |
//!
//! Each config becomes a list of [rules]. An unsupported option is refused with its field and
//! value.

mod auto_round;
mod compressed_floats;
mod compressed_tensors;
mod fields;
mod fp8;
mod gptq;
mod modelopt;
mod mxfp4;
mod pattern;
mod rules;
mod spec;

use std::fmt;
use std::io::ErrorKind;
use std::path::Path;

use serde_json::Value;

use self::fields::Fields;
use self::rules::Rules;
use super::files::{MAX_CONFIG_BYTES, read_file};
use super::{CONFIG_FILE, CheckpointError, ConfigError, Fp8Format, LayerFormat};

/// The names of files that hold only a quantization config, as written by GPTQ and AWQ programs and
/// by ModelOpt.
const QUANTIZE_CONFIG_FILES: [&str; 3] = [
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
];
const METHODS: &str =
    "`gptq`, `awq`, `compressed-tensors`, `auto-round`, `fp8`, `fbgemm_fp8`, `modelopt` or `mxfp4`";

/// The quantisation of each layer of a checkpoint, according to its configs.
///
/// ```
/// use marlin_format::checkpoint::{LayerFormat, Quantization};
///
/// let config = br#"{ "quantization_config": { "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": true, "sym": true } }"#;
/// let quantization = Quantization::from_config(config)?.expect("a quantised model");
/// assert_eq!(quantization.to_string(), "gptq v1 int4 g128 act-order");
/// assert_eq!(quantization.layer("model.layers.0.mlp.up_proj")?.to_string(), "gptq v1 int4 g128 act-order");
/// assert_eq!(quantization.layer("lm_head")?, LayerFormat::Float);
/// # Ok::<(), marlin_format::checkpoint::ConfigError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Quantization {
    /// The rules. The first rule that selects a layer takes effect; other layers are not quantised.
    rules: Rules,
    /// False if activations keep their bits beside 8-bit floats, whatever the config declares.
    fp8_activations: bool,
}

impl Quantization {
    /// The names of the field of a model's config that holds the quantization config. Older files
    /// have the second name.
    pub const CONFIG_FIELDS: [&str; 2] = ["quantization_config", "compression_config"];

    /// Reads the configs of a folder: `config.json`, or if that has no quantization config,
    /// `quantize_config.json`, `quant_config.json` or `hf_quant_config.json`. `config.json` takes
    /// precedence, as in other readers. Returns `None` if there is no quantization config.
    ///
    /// # Errors
    /// [`CheckpointError::Config`] for a config that is not valid JSON or not supported;
    /// [`CheckpointError::Io`].
    pub fn read(dir: &Path) -> Result<Option<Self>, CheckpointError> {
        let path = dir.join(CONFIG_FILE);
        let invalid = |path| move |source| CheckpointError::Config { path, source };
        if let Some(text) = read_if_there(&path)?
            && let Some(quantization) = Self::from_config(&text).map_err(invalid(path))?
        {
            return Ok(Some(quantization));
        }
        for name in QUANTIZE_CONFIG_FILES {
            let path = dir.join(name);
            if let Some(text) = read_if_there(&path)? {
                return Ok(Some(
                    Self::from_quantize_config(&text).map_err(invalid(path))?,
                ));
            }
        }
        Ok(None)
    }

    /// Parses the text of a `config.json`: its `quantization_config`, or that of its `text_config`.
    /// Returns `None` if there is neither.
    ///
    /// # Errors
    /// [`ConfigError`], with the field and its value, for every method, format or option that is
    /// not supported.
    /// not supported.
    pub fn from_config(text: &[u8]) -> Result<Option<Self>, ConfigError> {
        let json: Value = serde_json::from_slice(text)?;
        let config = Fields::new(&json, String::new())?;
        let own = config.first(&Self::CONFIG_FIELDS);
        let found = match own {
            Some(found) => Some(found),
            None => config
                .object("text_config")?
                .and_then(|text_config| text_config.first(&Self::CONFIG_FIELDS)),
        };
        found
            .map(|(_, quantization)| Self::new(quantization, None))
            .transpose()
    }

    /// Parses the text of a `quantize_config.json`, which is a quantization config itself. Older
    /// files do not name their method, nor does ModelOpt's `hf_quant_config.json`.
    ///
    /// # Errors
    /// The errors of [`from_config`](Self::from_config).
    pub fn from_quantize_config(text: &[u8]) -> Result<Self, ConfigError> {
        let json: Value = serde_json::from_slice(text)?;
        let fields = Fields::new(&json, String::new())?;
        let method = if fields.get(modelopt::NESTED).is_some() {
            "modelopt"
        } else if fields.first(&["zero_point", "w_bit"]).is_some() {
            "awq"
        } else {
            "gptq"
        };
        Self::new(&json, Some(method))
    }

    /// Creates the rules of a quantization config. `method` is the method of a config that does not
    /// name one.
    fn new(config: &Value, method: Option<&str>) -> Result<Self, ConfigError> {
        const METHOD_FIELDS: [&str; 2] = ["quant_method", "method"];
        let root = Fields::new(config, String::new())?;
        let (name, method) = match (root.first(&METHOD_FIELDS), method) {
            (Some((name, Value::String(method))), _) => (name, method.to_lowercase()),
            (Some((name, found)), _) => return Err(root.unsupported(name, METHODS, found)),
            // The oldest compressed-tensors configs do not name their method.
            (None, _) if root.get("config_groups").is_some() => {
                ("quant_method", "compressed-tensors".into())
            }
            (None, Some(method)) => ("quant_method", method.into()),
            (None, None) => return Err(root.missing("quant_method", METHODS)),
        };
        let rules = match method.as_str() {
            "gptq" | "marlin" => gptq::gptq_rules(&root)?,
            "awq" => gptq::awq_rules(&root)?,
            "compressed-tensors" => compressed_tensors::rules(&root)?,
            "auto-round" | "intel/auto-round" => auto_round::rules(&root)?,
            "fp8" => fp8::fp8_rules(&root)?,
            "fbgemm_fp8" => fp8::fbgemm_rules(&root)?,
            "modelopt" | "modelopt_fp4" => modelopt::rules(&root)?,
            "mxfp4" => mxfp4::rules()?,
            _ => return Err(root.unsupported(name, METHODS, &method.as_str().into())),
        };
        Ok(Self {
            rules,
            fp8_activations: true,
        })
    }

    /// Returns the quantisation with activations that are rounded to e4m3 where the config declares
    /// it, as it is by default, or (`false`) with activations that keep their bits everywhere.
    pub fn with_fp8_activations(self, fp8_activations: bool) -> Self {
        Self {
            fp8_activations,
            ..self
        }
    }

    /// Returns true if no layer is quantised, which means that the config only declares the storage
    /// format of float weights.
    pub fn is_float(&self) -> bool {
        self.rules
            .formats()
            .all(|format| format == LayerFormat::Float)
    }

    /// Returns the format of the linear layer with this name, such as `model.layers.0.mlp.up_proj`.
    ///
    /// # Errors
    /// [`ConfigError::Match`] if a pattern of the config exceeds the limit of steps in a match.
    pub fn layer(&self, name: &str) -> Result<LayerFormat, ConfigError> {
        Ok(match self.rules.format(name)? {
            Some(LayerFormat::Fp8(format)) => LayerFormat::Fp8(Fp8Format {
                activations: format.activations && self.fp8_activations,
                ..format
            }),
            Some(format) => format,
            None => LayerFormat::Float,
        })
    }
}

impl fmt::Display for Quantization {
    /// Writes the formats of quantised layers, the most general rule first:
    /// `gptq v1 int4 g128 and gptq v1 int8 g64`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut formats: Vec<LayerFormat> = Vec::new();
        // Rules are ordered from single layers to all layers.
        for format in self.rules.formats().rev() {
            if format != LayerFormat::Float && !formats.contains(&format) {
                formats.push(format);
            }
        }
        let texts: Vec<String> = formats.iter().map(LayerFormat::to_string).collect();
        f.pad(
            if texts.is_empty() {
                "float".into()
            } else {
                texts.join(" and ")
            }
            .as_str(),
        )
    }
}

fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>, CheckpointError> {
    match read_file(path, MAX_CONFIG_BYTES) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(CheckpointError::io("read", path, error)),
    }
}
