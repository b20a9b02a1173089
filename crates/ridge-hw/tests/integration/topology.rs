//! What `nvidia-smi topo -m` prints on published machines (`fixtures/topology`), and on machines that cannot be.

use ridge_hw::topology::{Matrix, PathType};

fn fixture(name: &str) -> String {
    let path = format!("{}/../../fixtures/topology/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn a_dgx_h100_has_a_card_beside_each_gpu_and_names_it_in_its_legend() {
    let matrix = Matrix::parse(&fixture("dgx-h100")).unwrap();
    assert_eq!((matrix.gpus.len(), matrix.nics.len()), (8, 12));
    assert!(
        (0..8).all(|i| (0..8).all(|j| matrix.between[i][j] == if i == j { PathType::X } else { PathType::NvLink(18) }))
    );
    assert_eq!(
        (matrix.to_nic[1][3], matrix.to_nic[1][4], matrix.to_nic[1][6]),
        (PathType::Pxb, PathType::Node, PathType::Sys)
    );
    assert_eq!((&*matrix.nics[3].label, &*matrix.nics[3].device), ("NIC3", "mlx5_3"));
    assert_eq!((matrix.gpus[5].cpus.as_deref(), matrix.gpus[5].numa), (Some("56-111,168-223"), Some(1)));
}

#[test]
fn older_versions_and_copies_from_a_terminal_read_alike() {
    let a100 = Matrix::parse(&fixture("dgx-a100")).unwrap();
    assert_eq!((&*a100.nics[11].device, a100.gpus[7].numa), ("mlx5_11", Some(5)));
    let pcie = Matrix::parse(&fixture("5-pcie")).unwrap();
    assert_eq!(pcie.between[1], [PathType::Sys, PathType::X, PathType::Phb, PathType::Node, PathType::Node]);
    assert_eq!((pcie.gpus[0].cpus.as_deref(), pcie.gpus[0].numa), (Some("8-15,24-31"), Some(1)));
    let spaces = fixture("dgx-a100").replace('\t', "    ");
    assert_eq!(Matrix::parse(&spaces).unwrap(), a100);
}

#[test]
fn an_empty_affinity_leaves_the_others_in_place() {
    let matrix = Matrix::parse(&fixture("8-h200-6-cards")).unwrap();
    assert_eq!((&matrix.gpus[0].cpus, matrix.gpus[0].numa), (&None, Some(0)));
    assert_eq!((matrix.gpus[4].cpus.as_deref(), matrix.gpus[4].numa), (Some("1"), Some(1)));
}

#[test]
fn text_around_the_matrix_and_missing_columns_do_not_matter() {
    let text =
        "$ nvidia-smi topo -m\nsome note\n        GPU0    GPU1\nGPU0     X      SYS\nGPU1    SYS      X\n\nbye\n";
    let matrix = Matrix::parse(text).unwrap();
    assert_eq!((matrix.between[0][1], &matrix.gpus[1].cpus, matrix.gpus[1].numa), (PathType::Sys, &None, None));
    assert_eq!(Matrix::parse("GPU0 CPU Affinity\nGPU0 X 0-19\n").unwrap().gpus[0].cpus.as_deref(), Some("0-19"));
}

#[test]
fn what_contradicts_itself_is_refused_with_its_line() {
    let two = |a: &str, b: &str| format!("\tGPU0\tGPU1\tmlx5_0\nGPU0\tX\t{a}\nGPU1\t{b}\nmlx5_0\tPIX\tSYS\tX\n");
    let good = two("NV4\tPIX", "NV4\tX\tSYS");
    assert!(Matrix::parse(&good).is_ok());
    for (text, wanted) in [
        (two("NV4\tPIX", "SYS\tX\tSYS"), "line 3: GPU0 to GPU1 is NV4, but GPU1 to GPU0 is SYS"),
        (two("NV4\tPIX", "NV4\tPHB\tSYS"), "line 3: GPU1 to GPU1 is not X (PHB)"),
        (two("X\tPIX", "X\tX\tSYS"), "line 2: GPU0 to GPU1 is X (X), but they are two devices"),
        (two("NV4", "NV4\tX\tSYS"), "line 2: the row GPU0 has 2 cells for 3 devices"),
        (two("NV40\tPIX", "NV40\tX\tSYS"), "line 2: GPU0: NV40, but a GPU has 1 to 18 NVLinks"),
        (two("NV0\tPIX", "NV0\tX\tSYS"), "line 2: GPU0: NV0"),
        (two("FAST\tPIX", "FAST\tX\tSYS"), "\"FAST\" is not one of X, NV#"),
        (good.replace("GPU1\tNV4", "GPU7\tNV4"), "line 3: the row \"GPU7\" has no column"),
        (good.replacen("\tmlx5_0\n", "\tGPU1\n", 1), "line 1: the column GPU1 appears twice"),
        (good.replace("mlx5_0\tPIX", "GPU1\tPIX"), "line 4: the row GPU1 appears twice"),
        ("\tGPU0\tGPU1\nGPU0\tX\tSYS\n".to_owned(), "line 2: GPU1 has a column but no row"),
        (String::new(), "line 1: no line lists GPU0"),
        (good.replace("PIX", "NV4"), "GPU0: NV4 to mlx5_0, a network card"),
        ("\tGPU0\tCPU Affinity\nGPU0\tX\tfour\n".to_owned(), "\"four\" is not a list of CPUs"),
        ("\tGPU0\tNUMA Affinity\nGPU0\tX\tfour\n".to_owned(), "\"four\" is not a NUMA node number"),
    ] {
        let said = Matrix::parse(&text).unwrap_err().to_string();
        assert!(said.contains(wanted), "{said}\n{text}");
    }
    // A cube mesh has few links to each; no GPU has this many in all.
    let said = Matrix::parse(&fixture("8-v100-cube-mesh").replace("NV2", "NV9")).unwrap_err().to_string();
    assert!(said.contains("GPU0 has 20 NVLinks"), "{said}");
}

#[test]
fn no_text_makes_it_panic() {
    let text = fixture("dgx-h100");
    for cut in (0..text.len()).step_by(7) {
        let _ = Matrix::parse(&text[..cut]);
        let _ = Matrix::parse(&text[cut..]);
    }
    for text in ["\x1b", "\x1b[", "\x1b[4", "GPU0", "GPU0\n", "\tGPU0\n\tX\n", "GPU18446744073709551616", "\x1bé"] {
        let _ = Matrix::parse(text);
    }
}
