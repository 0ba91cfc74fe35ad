use std::thread;

use burn::tensor::Device;
use marlin_testing::rng;
use rand::RngExt;

use super::*;

/// Returns the communicators of a group of ranks.
fn communicators(count: usize, timeout: Duration) -> Vec<Communicator> {
    let devices = (0..count).map(|rank| format!("card {rank}")).collect();
    let group = Group::new(devices, timeout);
    (0..count)
        .map(|rank| Communicator::new(group.clone(), rank))
        .collect()
}

/// Runs `work` on a thread for each rank, and returns the results by rank.
fn on_each<T: Send>(
    communicators: &[Communicator],
    work: impl Fn(usize, &Communicator) -> T + Sync,
) -> Vec<T> {
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = communicators
            .iter()
            .enumerate()
            .map(|(rank, communicator)| scope.spawn(move || work(rank, communicator)))
            .collect();
        let results = threads.into_iter().map(|thread| thread.join().unwrap());
        results.collect()
    })
}

fn tensor(values: &[f32], shape: [usize; 2]) -> Tensor<2> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), &Device::flex())
}

fn values(tensor: Tensor<2>) -> Vec<f32> {
    tensor.try_into_vec_as::<f32>().unwrap()
}

#[test]
fn sums_and_gathers_have_the_same_bits_on_all_ranks() {
    let mut rng = rng();
    let ranks = communicators(3, Duration::from_secs(60));
    // Values whose sum depends on the order.
    let steps: Vec<Vec<Vec<f32>>> = (0..500)
        .map(|step| {
            let length = 1 + step % 7;
            let mut value = || (rng.random::<f32>() - 0.5) * 10f32.powi(rng.random_range(-4..5));
            let mut values = || (0..length).map(|_| value()).collect();
            (0..3).map(|_| values()).collect()
        })
        .collect();
    let found = on_each(&ranks, |rank, ranks| {
        let sum = |parts: &Vec<Vec<f32>>| {
            let length = parts[rank].len();
            let sum = values(ranks.sum(tensor(&parts[rank], [1, length])));
            // Each rank has another width.
            let own = &parts[rank].repeat(rank + 1);
            let width = 6 * length;
            let gathered = values(ranks.gather(tensor(own, [1, own.len()]), width));
            (sum, gathered)
        };
        steps.iter().map(sum).collect::<Vec<_>>()
    });
    for (step, parts) in steps.iter().enumerate() {
        let sum: Vec<f32> = (0..parts[0].len())
            .map(|i| parts[0][i] + parts[1][i] + parts[2][i])
            .collect();
        let gathered = [parts[0].clone(), parts[1].repeat(2), parts[2].repeat(3)].concat();
        for (rank, found) in found.iter().enumerate() {
            assert_eq!(
                found[step],
                (sum.clone(), gathered.clone()),
                "{step}, rank {rank}"
            );
        }
    }
}

#[test]
fn rows_are_gathered_row_by_row() {
    let ranks = communicators(2, Duration::from_secs(60));
    let parts = [
        tensor(&[1.0, 2.0], [2, 1]),
        tensor(&[3.0, 4.0, 5.0, 6.0], [2, 2]),
    ];
    let found = on_each(&ranks, |rank, ranks| {
        values(ranks.gather(parts[rank].clone(), 3))
    });
    assert_eq!(found, [[1.0, 3.0, 4.0, 2.0, 5.0, 6.0]; 2]);
}

#[test]
fn a_rank_that_does_not_come_is_named_within_the_bound() {
    let timeout = Duration::from_millis(50);
    let ranks = communicators(3, timeout);
    let start = Instant::now();
    let found = on_each(&ranks, |rank, ranks| {
        (rank != 1).then(|| values(ranks.sum(tensor(&[rank as f32], [1, 1]))))
    });
    assert!(start.elapsed() < Duration::from_secs(30));
    // The input, whose value does not matter any more.
    assert_eq!(found, [Some(vec![0.0]), None, Some(vec![2.0])]);
    let failure = ranks[0].group().failure();
    assert!(
        matches!(
            &failure,
            Some(ParallelError::Late { rank: 1, device, waited, .. })
                if device == "card 1" && *waited == timeout
        ),
        "{failure:?}"
    );
    // Later calls return at once, with NaN for what has another shape.
    let start = Instant::now();
    let gathered = values(ranks[2].gather(tensor(&[1.0], [1, 1]), 3));
    assert!(gathered.len() == 3 && gathered.iter().all(|value| value.is_nan()));
    assert!(start.elapsed() < timeout);
    // A new session is not touched by the old one.
    let group = ranks[0].group();
    let old = group.session();
    group.reset();
    let found = on_each(&ranks, |rank, ranks| {
        values(ranks.sum(tensor(&[rank as f32], [1, 1])))
    });
    assert_eq!(found, [[3.0]; 3]);
    assert_eq!(group.check(group.session()), Ok(()));
    assert_eq!(group.check(old), failure.map_or(Ok(()), Err));
}

#[test]
fn an_error_of_a_device_wakes_all_ranks() {
    let ranks = communicators(2, Duration::from_secs(600));
    let start = Instant::now();
    on_each(&ranks, |rank, ranks| match rank {
        0 => drop(ranks.sum(tensor(&[1.0], [1, 1]))),
        _ => ranks.fail("out of memory".into()),
    });
    assert!(start.elapsed() < Duration::from_secs(300));
    let failure = ranks[0].group().failure();
    assert!(
        matches!(&failure, Some(ParallelError::Device { rank: 1, reason, .. }) if reason == "out of memory"),
        "{failure:?}"
    );
}
