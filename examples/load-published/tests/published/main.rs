//! A published BERT in an ordinary Burn model: `tests/golden/bert-ct-int4-g32`, which
//! llm-compressor wrote.

mod errors;
mod export;
mod load;
mod support;
