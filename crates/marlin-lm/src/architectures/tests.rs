use std::collections::BTreeSet;

use serde_json::json;

use super::*;
use crate::tests::support::config_of;

#[test]
fn a_block_lists_each_projection_once_and_in_order() {
    for architecture in Architecture::ALL {
        let config = config_of(architecture, json!({}));
        let block = config.block(0);
        let kinds: Vec<ProjectionKind> = block
            .projections()
            .map(|projection| projection.kind)
            .collect();
        let expected = match block.mlp() {
            Some(_) => &ProjectionKind::ALL[..],
            None => &ProjectionKind::ALL[..2],
        };
        assert_eq!(kinds, expected, "{architecture}");
        let names: Vec<&str> = block
            .projections()
            .flat_map(|projection| projection.names())
            .collect();
        let distinct: BTreeSet<&&str> = names.iter().collect();
        assert_eq!(distinct.len(), names.len(), "{architecture}: {names:?}");
        for kind in kinds {
            let projection = block.projection(kind).unwrap();
            assert_eq!(projection.kind, kind, "{architecture}");
            // The outputs that are added to the residual stream, and the inputs that come from the
            // stream, have its width.
            let of_stream = if kind.is_residual() {
                projection.n()
            } else {
                projection.k
            };
            assert_eq!(of_stream, config.hidden_size, "{architecture} {kind:?}");
        }
    }
}

#[test]
fn the_layers_of_a_projection_divide_its_output_features() {
    for architecture in Architecture::ALL {
        let config = config_of(architecture, json!({}));
        for projection in config.block(0).projections() {
            for count in [1, projection.outputs.len()] {
                let mut end = 0;
                for (name, columns) in projection.columns(projection.names_of(count)) {
                    assert_eq!(columns.start, end, "{architecture} {name}");
                    end = columns.end;
                }
                assert_eq!(end, projection.n(), "{architecture} {}", projection.name);
            }
        }
    }
}

#[test]
fn input_features_come_from_channels_of_the_last_output() {
    for architecture in Architecture::ALL {
        let config = config_of(architecture, json!({}));
        let block = config.block(0);
        for projection in block.projections() {
            let Some(origin) = projection.input.projection() else {
                continue;
            };
            let channels: BTreeSet<usize> = (0..projection.k)
                .map(|feature| projection.input.channel(feature))
                .collect();
            let last = block.projection(origin).unwrap().outputs.last().copied();
            assert_eq!(
                channels,
                (0..last.unwrap_or(0)).collect(),
                "{architecture} {}",
                projection.name
            );
        }
    }
}

#[test]
fn phi3_reads_gate_and_up_also_where_a_file_has_them_apart() {
    let config = config_of(Architecture::Phi3, json!({}));
    let block = config.block(3);
    let gate_up = block.projection(ProjectionKind::GateUp).unwrap();
    let names = |contains: fn(&str) -> bool| -> Vec<String> {
        let layers = gate_up.layers_of("model.layers.3", contains);
        layers.into_iter().map(|layer| layer.name).collect()
    };
    assert_eq!(names(|_| false), ["model.layers.3.mlp.gate_up_proj"]);
    assert_eq!(
        names(|name| name.ends_with(".up_proj")),
        ["model.layers.3.mlp.gate_proj", "model.layers.3.mlp.up_proj"]
    );
}
