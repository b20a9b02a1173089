//! Graphs whose fused groups have views.

use ridge_graph::{Builder, DType, Graph, Result, Shape, Type};

/// Graphs with views of every kind, among them values large enough for vectors.
pub(crate) fn graphs() -> Result<Vec<Graph>> {
    let mut graphs = Vec::new();
    for (tokens, heads, width) in [(3, 4, 6), (1, 2, 8), (520, 8, 80)] {
        let mut g = Builder::new();
        let x = g.step_input("x", Type::tensor(DType::BF16, [tokens, 3 * heads * width]))?;
        let bias = g.weight("bias", Type::tensor(DType::F32, [heads * width]))?;
        let rows = g.step_input("rows", Type::tensor(DType::I32, [tokens]))?;
        let part = |g: &mut Builder, i: usize| g.slice(x, 1, i * heads * width, heads * width);
        let (a, b, c) = (part(&mut g, 0)?, part(&mut g, 1)?, part(&mut g, 2)?);
        let a = g.cast(a, DType::F32)?;
        let biased = g.add(a, bias)?;
        let opened = g.sigmoid(biased)?;
        // By heads, transposed, with halves exchanged.
        let by_heads = g.reshape(b, Shape::new([tokens, heads, width]))?;
        let swapped = g.transpose(by_heads, &[1, 0, 2])?;
        let (low, high) = (g.slice(swapped, 2, 0, width / 2)?, g.slice(swapped, 2, width / 2, width / 2)?);
        let turned = g.concat(&[high, low], 2)?;
        let picked = g.gather(c, rows, 0)?;
        let padded = g.pad(picked, 0, 2, 1, 0.5)?;
        let back = g.transpose(turned, &[1, 0, 2])?;
        let back = g.reshape(back, Shape::new([tokens, heads * width]))?;
        let back = g.cast(back, DType::F32)?;
        let product = g.mul(back, opened)?;
        // A norm of what views give.
        let square = g.mul(product, product)?;
        let total = g.reduce_sum(square, 1)?;
        let scaled = g.div(product, total)?;
        let outputs = [("turned", turned), ("padded", padded), ("product", product), ("scaled", scaled), ("a", biased)];
        graphs.push(g.finish(outputs.map(|(name, var)| (name.to_owned(), var)).to_vec())?);
    }
    // Vectors: by rows, by columns, behind slices and transposes, and where rows are not whole vectors.
    for (rows, columns, first) in [(512, 640, 320), (512, 640, 3), (700, 401, 8)] {
        let mut g = Builder::new();
        let x = g.step_input("x", Type::tensor(DType::BF16, [rows, columns + 320]))?;
        let by_column = g.weight("by_column", Type::tensor(DType::F32, [columns]))?;
        let by_row = g.step_input("by_row", Type::tensor(DType::F16, [rows, 1]))?;
        let turned = g.step_input("turned", Type::tensor(DType::F32, [columns, rows]))?;
        let part = g.slice(x, 1, first, columns)?;
        let part = g.cast(part, DType::F32)?;
        let by_row = g.cast(by_row, DType::F32)?;
        let turned = g.transpose(turned, &[1, 0])?;
        let sum = g.add(part, by_column)?;
        let scaled = g.mul(sum, by_row)?;
        let y = g.add(scaled, turned)?;
        let number = g.iota(Shape::new([rows, columns]), 1, DType::I32)?;
        let narrow = g.cast(sum, DType::BF16)?;
        let outputs = [("y", y), ("narrow", narrow), ("number", number)];
        graphs.push(g.finish(outputs.map(|(name, var)| (name.to_owned(), var)).to_vec())?);
    }
    // More rows than a launch has blocks, with values of another shape beside them.
    let mut g = Builder::new();
    let x = g.step_input("x", Type::tensor(DType::F32, [66_000, 2]))?;
    let total = g.reduce_sum(x, 1)?;
    let shares = g.sub(x, total)?;
    let turned = g.transpose(x, &[1, 0])?;
    let part = g.slice(turned, 1, 500, 65_500)?;
    graphs.push(g.finish(vec![("shares".into(), shares), ("part".into(), part)])?);
    graphs.push(products_beside_a_norm(&MANY)?);
    graphs.push(products_beside_a_norm(&[36])?);
    Ok(graphs)
}

/// Nine products of four inputs each.
pub(crate) const MANY: [usize; 9] = [4; 9];

/// A norm whose blocks have 512 threads, beside products of so many inputs, large enough for vectors.
pub(crate) fn products_beside_a_norm(products: &[usize]) -> Result<Graph> {
    let mut g = Builder::new();
    let x = g.step_input("x", Type::tensor(DType::F32, [256, 1024]))?;
    let square = g.mul(x, x)?;
    let total = g.reduce_sum(square, 1)?;
    let mut outputs = vec![("norm".to_owned(), g.div(x, total)?)];
    for (i, count) in products.iter().enumerate() {
        let ty = Type::tensor(DType::F32, [1024, 256]);
        let mut product = g.step_input(&format!("x{i}.0"), ty.clone())?;
        for k in 1..*count {
            let x = g.step_input(&format!("x{i}.{k}"), ty.clone())?;
            product = g.mul(product, x)?;
        }
        outputs.push((format!("product{i}"), product));
    }
    g.finish(outputs)
}
