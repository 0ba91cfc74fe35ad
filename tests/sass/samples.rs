//! Tests of the parsers and the rules on texts with and without faults.

use crate::listing::{Code, ListingError, Usage, listings_of, logs_of};
use crate::rules::broken;
use crate::toolchain::Compiled;
use libtest_mimic::Trial;
use marlin_kernels::inspect::shared_limit;
use marlin_kernels::tile::{Config, RowOrder, Tile, configs};

/// A log of ptxas 13.5 for a kernel that obeys the rules.
const LOG: &str = "ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'matmul_f_f16_44ad3521' for 'sm_86'
ptxas info    : Function properties for matmul_f_f16_44ad3521
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 77 registers, used 1 barriers, 456 bytes cmem[0]
ptxas info    : Compile time = 58.014 ms
";

/// Lines of a listing that nvdisasm 13.5 wrote, with a local load added.
const LISTING: &str = "	.target	sm_80
//--------------------- .text.matmul_f_f16_b424523b --------------------------
.text.matmul_f_f16_b424523b:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_286:
        /*02b0*/              @!P0 EXIT ;
        /*0b10*/                   LDGSTS.E.BYPASS.128 [R27], [R20.64] ;
        /*0bd0*/              @!P1 LDGSTS.E.BYPASS.128 [R29+0x4000], [R14.64], !P4 ;
        /*0c00*/              @!P0 LDGSTS.E [R31+0x4000], [R16.64], !P5 ;
        /*0c10*/                   LDSM.16.M88.4 R8, [R8] ;
        /*0c20*/             @!UP0 ULOP3.LUT UR4, UR4, 0x7, URZ, 0xc0, !UPT ;
        /*0c30*/                   LOP3.LUT R2, R3, 0xf000f, RZ, 0xc0, !PT ;
        /*0c40*/                   LOP3.LUT R2, R3, 0x64006400, R9, 0xec, !PT ;
        /*0c50*/                   LOP3.LUT R2, R3, 0x64006400, RZ, 0xfc, !PT ;
        /*0c60*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0c70*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0c80*/              @!P0 LDL.64 R2, [R1+0x8] ;
        /*0c90*/                   STL [R1], R2 ;
";

pub fn trials() -> Vec<Trial> {
    [
        ("a_clean_log_is_read", clean_log as fn()),
        ("a_log_with_faults_is_read", faulty_log),
        ("a_log_in_other_words_is_refused", foreign_log),
        ("instructions_are_told_apart", instructions),
        ("a_listing_without_instructions_is_refused", no_instructions),
        ("logs_of_two_kernels_are_told_apart", two_logs),
        ("listings_of_two_kernels_are_told_apart", two_listings),
        ("a_sound_kernel_breaks_no_rule", sound_kernel),
        ("each_fault_breaks_its_rule", faulty_kernels),
        (
            "each_fault_of_warpgroups_breaks_its_rule",
            faulty_warpgroups,
        ),
    ]
    .map(|(name, body)| {
        Trial::test(format!("samples::{name}"), move || {
            body();
            Ok(())
        })
    })
    .into()
}

fn clean_log() {
    assert_eq!(
        Usage::parse(LOG),
        Ok(Usage {
            registers: 77,
            ..Usage::default()
        })
    );
}

fn faulty_log() {
    let log = LOG
        .replace(
            "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
            "40 bytes stack frame, 36 bytes spill stores, 12 bytes spill loads",
        )
        .replace("456 bytes cmem", "1024 bytes smem, 456 bytes cmem")
        + "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n";
    let usage = Usage::parse(&log).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(
        (
            usage.registers,
            usage.static_shared,
            usage.stack,
            usage.spills,
            usage.remarks.len()
        ),
        (77, 1024, 40, 48, 1)
    );
}

fn foreign_log() {
    for (line, missing) in [
        ("bytes stack frame", "bytes stack frame"),
        ("bytes spill loads", "bytes spill loads"),
        ("registers", "registers"),
    ] {
        let error = Usage::parse(&LOG.replace(line, "?")).map_or_else(
            |error| error,
            |usage| panic!("read {usage:?} without `{line}`"),
        );
        assert!(
            matches!(&error, ListingError::NoLine(what, _) if *what == missing),
            "{error}"
        );
    }
}

fn instructions() {
    let code = code(LISTING);
    assert_eq!(code.len(), 14);
    let found = [
        code.count("LDGSTS", &[]),
        code.count("LDGSTS", &["BYPASS", "128"]),
        code.count("LDSM", &["16", "M88", "4"]),
        code.count("HMMA", &["16816", "F32"]),
        code.count("HMMA", &["16816", "F32", "BF16"]),
        code.count("LOP3", &[]),
        code.count_mask_or("0x64006400"),
        code.count("LDL", &[]),
        code.count("STL", &[]),
        code.count("LDG", &[]),
    ];
    assert_eq!(found, [3, 2, 1, 2, 1, 3, 1, 1, 1, 0]);
}

fn no_instructions() {
    assert!(matches!(
        Code::parse(".target sm_80\n        /* nothing */\n"),
        Err(ListingError::Empty)
    ));
}

fn two_logs() {
    let other = LOG
        .replace("44ad3521", "b424523b")
        .replace("Used 77", "Used 96");
    let (_, other) = other.split_once('\n').unwrap_or_default();
    let logs = logs_of(
        &format!("ptxas info    : (C7508) of all\n{LOG}{other}"),
        &["matmul_f_f16_b424523b", "matmul_f_f16_44ad3521"],
    );
    let usages: Vec<Usage> = logs
        .iter()
        .map(|log| Usage::parse(log).unwrap_or_else(|error| panic!("{error}")))
        .collect();
    assert_eq!(
        usages
            .iter()
            .map(|usage| (usage.registers, usage.remarks.len()))
            .collect::<Vec<_>>(),
        [(96, 1), (77, 1)]
    );
}

fn two_listings() {
    let both = LISTING.to_owned()
        + "//--------------------- .nv.shared.f ----\n\t.zero 1024\n.text.f:\n        /*0000*/                   EXIT ;\n";
    let listings = listings_of(&both, &["f", "matmul_f_f16_b424523b"])
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(
        listings
            .iter()
            .map(|listing| code(listing).len())
            .collect::<Vec<_>>(),
        [1, 14]
    );
    for kernels in [
        vec!["f"],
        vec!["f", "g"],
        vec!["f", "matmul_f_f16_b424523b", "g"],
    ] {
        assert!(
            matches!(
                listings_of(&both, &kernels),
                Err(ListingError::Functions { .. })
            ),
            "{kernels:?}"
        );
    }
}

fn code(listing: &str) -> Code {
    Code::parse(listing).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns a configuration for sm_80 in f16, and a listing that obeys every rule.
fn sound() -> (Config, String) {
    let config = configs(80, shared_limit(80), RowOrder::InOrder)
        .into_iter()
        .find(|config| !config.bf16);
    let Some(config) = config else {
        panic!("no configuration in f16 fits {} bytes", shared_limit(80))
    };
    let (rows, columns, depth) = (
        config.tile.rows(),
        config.tile.columns() / config.tile.warps_n,
        config.tile.depth() / config.tile.warps_k,
    );
    let counts = [
        (
            "LDGSTS.E.BYPASS.128 [R27], [R20.64]",
            columns * depth / 1024,
        ),
        ("LDSM.16.M88.4 R8, [R8]", rows * depth / 256),
        (
            "LOP3.LUT R2, R3, 0x64006400, R9, 0xec, !PT",
            columns * depth / 64,
        ),
        (
            "HMMA.16816.F32 R4, R8, R12, R4",
            rows * columns * depth / 2048,
        ),
    ];
    (config, lines(&counts))
}

/// Returns a configuration of 16 rows for warpgroups in bf16, and a listing that obeys every rule.
fn sound_warpgroup() -> (Config, String) {
    let config = configs(90, shared_limit(90), RowOrder::InOrder)
        .into_iter()
        .find(|config| {
            config.bf16 && !config.zero_points && config.tile.is_wgmma() && config.tile.rows() == 16
        });
    let Some(config) = config else {
        panic!(
            "no configuration of warpgroups in bf16 fits {} bytes",
            shared_limit(90)
        )
    };
    let counts = [
        ("UBLKCP.S.G [UR42], [UR46], UR60", 4 * config.tile.warps_k),
        ("UTMALDG.2D [UR8], [UR26]", config.tile.warps_k),
        ("LOP3.LUT R2, R3, 0x43004300, R9, 0xec, !PT", 64),
        ("HGMMA.64x16x16.F32.BF16 R48, R88, gdesc[UR8], R48", 15),
        (
            "HGMMA.64x16x16.F32.BF16 R24, R100, gdesc[UR28], R24, gsb0",
            1,
        ),
        ("WARPGROUP.DEPBAR.LE gsb0, 0x1", 4),
        ("WARPGROUP.DEPBAR.LE gsb0, 0x0", 1),
    ];
    (config, lines(&counts))
}

/// Returns a listing with each instruction repeated `count` times.
fn lines(counts: &[(&str, usize)]) -> String {
    counts
        .iter()
        .flat_map(|&(text, count)| std::iter::repeat_n(line(text), count))
        .collect()
}

fn line(instruction: &str) -> String {
    format!("        /*0000*/                   {instruction} ;\n")
}

/// Returns the rules broken by a kernel for sm_80 whose dynamic shared memory is `spare` bytes
/// below the limit.
fn rules(config: &Config, log: &str, listing: &str, spare: usize) -> Vec<String> {
    let usage = Usage::parse(log).unwrap_or_else(|error| panic!("{error}"));
    let shared_bytes = shared_limit(80) - spare + usage.static_shared;
    broken(
        80,
        config,
        &Compiled {
            usage,
            code: code(listing),
            shared_bytes,
        },
    )
}

fn sound_kernel() {
    let (config, listing) = sound();
    assert_eq!(rules(&config, LOG, &listing, 0), Vec::<String>::new());
    let most = LOG
        .replace("Used 77", "Used 255")
        .replace("456 bytes cmem", "16 bytes smem, 456 bytes cmem");
    assert_eq!(rules(&config, &most, &listing, 16), Vec::<String>::new());
    let (config, listing) = sound_warpgroup();
    assert_eq!(rules(&config, LOG, &listing, 0), Vec::<String>::new());
}

fn faulty_kernels() {
    let (config, sound) = sound();
    for (good, bad, word) in [
        (
            "Used 77 registers",
            "Used 256 registers",
            "256 registers a thread",
        ),
        ("0 bytes stack frame", "8 bytes stack frame", "stack frame"),
        ("0 bytes spill stores", "4 bytes spill stores", "spills"),
        ("0 bytes spill loads", "4 bytes spill loads", "spills"),
        (
            "456 bytes cmem",
            "16 bytes smem, 456 bytes cmem",
            "shared memory",
        ),
        (
            "0 bytes gmem",
            "(C7508) Potential Performance Loss",
            "C7508",
        ),
    ] {
        one(rules(&config, &LOG.replace(good, bad), &sound, 0), word);
    }
    // 129 registers are allocated as 136, and 512 threads can have 128 each.
    let wide = Config {
        tile: Tile {
            warps_k: 16 / config.tile.warps_n,
            ..config.tile
        },
        ..config
    };
    assert_eq!(
        rules(&wide, &LOG.replace("Used 77", "Used 128"), &sound, 0),
        Vec::<String>::new()
    );
    one(
        rules(&wide, &LOG.replace("Used 77", "Used 129"), &sound, 0),
        "17408 registers",
    );

    for (more, word) in [
        ("LDL.64 R4, [R1]", "LDL"),
        ("STL [R1], R4", "STL"),
        ("HMMA.16816.F32 R4", "mma.sync"),
        ("HMMA.16816.F16 R4", "HMMA"),
    ] {
        one(rules(&config, LOG, &(sound.clone() + &line(more)), 0), word);
    }
    for (good, bad, word) in [
        (
            "LDSM.16.M88.4 R8, [R8]",
            "LDSM.16.M88.2 R8, [R8]",
            "ldmatrix",
        ),
        ("LDGSTS.E.BYPASS.128", "LDGSTS.E.128", "cp.async"),
        ("R3, 0x64006400, R9, 0xec", "R3, 0xf000f, RZ, 0xc0", "lop3"),
        ("HMMA.16816.F32 ", "FFMA ", "mma.sync"),
        ("HMMA.16816.F32 R4", "HMMA.16816.F32.BF16 R4", "mma.sync"),
    ] {
        let broken = rules(&config, LOG, &sound.replacen(good, bad, 1), 0);
        assert!(
            broken.iter().any(|rule| rule.contains(word)),
            "`{bad}` in place of `{good}` broke only {broken:?}"
        );
    }
}

fn faulty_warpgroups() {
    let (config, sound) = sound_warpgroup();
    one(
        rules(
            &config,
            LOG,
            &(sound.clone() + &line("HMMA.16816.F32.BF16 R4")),
            0,
        ),
        "HMMA, QMMA, HGMMA and QGMMA",
    );
    one(
        rules(
            &config,
            LOG,
            &(sound.clone() + &line("WARPGROUP.DEPBAR.LE gsb0, 0x0")),
            0,
        ),
        "6 waits",
    );
    for (good, bad, word) in [
        ("HGMMA.64x16x16.F32.BF16", "HGMMA.64x16x16.F32", "wgmma"),
        ("HGMMA.64x16x16.F32.BF16", "HGMMA.64x8x16.F32.BF16", "wgmma"),
        ("HGMMA.64x16x16.F32.BF16", "FFMA", "wgmma"),
        ("UBLKCP.S.G", "LDGSTS.E.BYPASS.128", "cp.async"),
        ("UBLKCP.S.G", "LDG.E.128", "UBLKCP"),
        ("UTMALDG.2D", "UTMALDG.3D", "UTMALDG"),
    ] {
        let broken = rules(&config, LOG, &sound.replacen(good, bad, 1), 0);
        assert!(
            broken.iter().any(|rule| rule.contains(word)),
            "`{bad}` in place of `{good}` broke only {broken:?}"
        );
    }
}

fn one(broken: Vec<String>, word: &str) {
    assert!(
        matches!(&broken[..], [only] if only.contains(word)),
        "one rule on `{word}` was to be broken; broken: {broken:?}"
    );
}
