//! Ranks that are processes: how they meet, and how they part.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ridge_runtime::{CollectiveError, Collectives};

use crate::error::CommError;
use crate::health::Health;
use crate::lines::{Lines, Message};
use crate::link::{Link, LinkedGroup};
use crate::settings::{JoinSettings, Transport};
use crate::shared_memory::Segment;
use crate::tcp::TcpLink;
use crate::watch::{Patience, Watch};

/// Of what ranks say to each other when they meet.
const VERSION: u32 = 1;

/// This process's place among ranks that are processes. Dropping it before [`leave`](Self::leave) tells the others that
/// this rank has failed.
pub struct Cluster {
    rank: usize,
    ranks: usize,
    local: usize,
    health: Arc<Health>,
    group: Arc<LinkedGroup>,
    /// Until this rank has parted from the others.
    watch: Mutex<Option<Watch>>,
}

impl Cluster {
    /// Meets the other ranks.
    ///
    /// # Errors
    /// When ranks do not come in time, or do not fit together.
    pub fn join(settings: &JoinSettings) -> Result<Self, CommError> {
        let JoinSettings { rank, ranks, local, .. } = *settings;
        if ranks == 0 || rank >= ranks {
            let why = format!("must be below the number of ranks, {ranks}");
            return Err(CommError::Setting { name: "rank", value: rank.to_string(), why });
        }
        let (members, links) = if rank == 0 { gather(settings)? } else { come(settings)? };
        let health = Arc::new(Health::default());
        let group = Arc::new(LinkedGroup::new(rank, links, Arc::clone(&health)));
        let watch = Watch::start(rank, members, Arc::clone(&health), Patience(settings.patience))
            .map_err(failed(rank, "start a thread"))?;
        Ok(Self { rank, ranks, local, health, group, watch: Mutex::new(Some(watch)) })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Which of the ranks on its machine this one is.
    pub fn local(&self) -> usize {
        self.local
    }

    /// The group of all ranks.
    pub fn group(&self) -> Arc<dyn Collectives> {
        Arc::clone(&self.group) as Arc<dyn Collectives>
    }

    /// Gives every rank the bytes that rank 0 has.
    ///
    /// # Errors
    /// As for [`Collectives::exchange`].
    pub fn agree(&self, mine: &[u8]) -> Result<Vec<u8>, CollectiveError> {
        let from_first = |what: &str, mine: &[u8], bytes: usize| -> Result<Vec<u8>, CollectiveError> {
            let mut received = vec![0; bytes];
            let send: Vec<&[u8]> = (0..self.ranks).map(|_| if self.rank == 0 { mine } else { &[] }).collect();
            let mut receive: Vec<&mut [u8]> = (0..self.ranks).map(|_| &mut [][..]).collect();
            receive[0] = &mut received;
            self.group.exchange(what, &send, &mut receive)?;
            Ok(received)
        };
        let length = from_first("the length of what rank 0 says", &(mine.len() as u64).to_le_bytes(), 8)?;
        let length = length.try_into().map_or(0, u64::from_le_bytes);
        from_first("what rank 0 says", mine, length as usize)
    }

    /// Why the ranks cannot continue, if they cannot.
    pub fn failure(&self) -> Option<CollectiveError> {
        self.health.check().err()
    }

    /// Parts from the others in peace: this rank exchanges nothing more.
    pub fn leave(&self) {
        let (number, _) = self.health.progress();
        self.part(Message::Bye { number });
    }

    /// Tells the others that this rank cannot continue, and why.
    pub fn fail(&self, why: &str) {
        self.part(Message::Failed { why: why.to_owned() });
    }

    fn part(&self, farewell: Message) {
        let watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut watch) = watch {
            watch.end(farewell);
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.fail(&self.failure().map_or_else(|| "its work failed".to_owned(), |error| error.to_string()));
    }
}

fn failed(rank: usize, what: &str) -> impl Fn(io::Error) -> CommError + use<> {
    let what = what.to_owned();
    move |cause| CommError::Connection { rank, what: what.clone(), cause }
}

/// What a rank has after it met the others: lines of messages, and links to exchange over.
type Met = (Vec<(usize, Lines)>, Vec<Option<Box<dyn Link>>>);

/// Rank 0 waits for the others.
fn gather(settings: &JoinSettings) -> Result<Met, CommError> {
    let ranks = settings.ranks;
    let deadline = Instant::now() + settings.wait;
    let listen = |cause| CommError::Listen { address: settings.meet.clone(), cause };
    let listener = TcpListener::bind(&settings.meet).map_err(listen)?;
    listener.set_nonblocking(true).map_err(listen)?;
    let data = DataListener::new(listener.local_addr().map_err(listen)?.ip(), 0)?;
    let mut members: Vec<Option<(Lines, SocketAddr)>> = (0..ranks).map(|_| None).collect();
    while members[1..].iter().any(Option::is_none) {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(_) if Instant::now() > deadline => {
                let absent = (1..ranks).filter(|rank| members[*rank].is_none()).collect();
                return Err(CommError::Absent { ranks, absent, waited: settings.wait });
            }
            Err(_) => {
                std::thread::sleep(Duration::from_millis(5));
                continue;
            }
        };
        // A stranger, or a rank that went away, is no reason to fail.
        let Ok(mut lines) = Lines::new(stream) else { continue };
        let Ok(Message::Hello { version, token, rank, ranks: of, transport, port }) =
            lines.wait(Instant::now() + Duration::from_secs(5))
        else {
            continue;
        };
        if token != settings.token {
            continue;
        }
        let why = if version != VERSION {
            format!("it runs another version of Ridge ({version}, here {VERSION})")
        } else if of != ranks {
            format!("it expects {of} ranks, but rank 0 expects {ranks}")
        } else if transport != settings.transport.name() {
            format!("it uses the transport {transport}, but rank 0 uses {}", settings.transport.name())
        } else if rank == 0 || rank >= ranks {
            format!("the expected ranks are 1 to {}", ranks - 1)
        } else if members[rank].is_some() {
            "this rank has already joined".to_owned()
        } else {
            let Ok(peer) = lines.stream().peer_addr() else { continue };
            members[rank] = Some((lines, SocketAddr::new(peer.ip(), port)));
            continue;
        };
        let _ = lines.send(&Message::Refused { why });
    }
    let segment = match settings.transport {
        Transport::SharedMemory => {
            let name = format!("ridge-{}-{:08x}", std::process::id(), fresh());
            Some(Segment::create(&name, ranks).map_err(failed(0, "create shared memory for the ranks"))?)
        }
        Transport::Tcp => None,
    };
    let addresses: Vec<String> = std::iter::once(data.address)
        .chain(members.iter().flatten().map(|(_, address)| *address))
        .map(|address| address.to_string())
        .collect();
    let table = Message::Table { addresses, segment: segment.as_ref().map(|(_, path)| path.display().to_string()) };
    let mut lines = Vec::with_capacity(ranks);
    for (rank, member) in members.into_iter().enumerate() {
        if let Some((mut line, _)) = member {
            line.send(&table).map_err(failed(0, &format!("answer rank {rank}")))?;
            lines.push((rank, line));
        }
    }
    let links = match &segment {
        Some((segment, _)) => (0..ranks).map(|other| (other != 0).then(|| segment.link(0, other))).collect(),
        None => data.link(settings, &[], deadline)?,
    };
    // All have opened it once each has said so.
    for (rank, line) in &mut lines {
        line.wait(deadline).map_err(failed(0, &format!("receive the ready message of rank {rank}")))?;
    }
    if let Some((_, path)) = segment {
        let _ = std::fs::remove_file(path);
    }
    Ok((lines, links))
}

/// Another rank comes to rank 0.
fn come(settings: &JoinSettings) -> Result<Met, CommError> {
    let JoinSettings { rank, ranks, .. } = *settings;
    let deadline = Instant::now() + settings.wait;
    let stream = loop {
        match connect(&settings.meet) {
            Ok(stream) => break stream,
            Err(cause) if Instant::now() > deadline => {
                return Err(CommError::NoMeeting {
                    rank,
                    address: settings.meet.clone(),
                    waited: settings.wait,
                    cause,
                });
            }
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let own = stream.local_addr().map_err(failed(rank, "find its own address"))?.ip();
    let first = stream.peer_addr().map_err(failed(rank, "find the address of rank 0"))?.ip();
    let data = DataListener::new(own, rank)?;
    let mut lines = Lines::new(stream).map_err(failed(rank, "send to rank 0"))?;
    let hello = Message::Hello {
        version: VERSION,
        token: settings.token.clone(),
        rank,
        ranks,
        transport: settings.transport.name().to_owned(),
        port: data.address.port(),
    };
    lines.send(&hello).map_err(failed(rank, "send to rank 0"))?;
    let (addresses, segment) = match lines.wait(deadline + Duration::from_secs(5)) {
        Ok(Message::Table { addresses, segment }) if addresses.len() == ranks => (addresses, segment),
        Ok(Message::Refused { why }) => return Err(CommError::Refused { rank, why }),
        Ok(_) => return Err(CommError::Refused { rank, why: "its response is invalid".into() }),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            let why = "it closed the connection; the tokens may differ, or other ranks may be missing".into();
            return Err(CommError::Refused { rank, why });
        }
        Err(error) => return Err(failed(rank, "receive a message from rank 0")(error)),
    };
    let links = match segment {
        Some(path) => {
            let segment = Segment::open(path.as_ref(), ranks)
                .map_err(failed(rank, &format!("open the shared memory {path}; all ranks must be on one machine")))?;
            (0..ranks).map(|other| (other != rank).then(|| segment.link(rank, other))).collect()
        }
        None => {
            // Rank 0 may listen at all of its addresses: this is one.
            let reachable = |address: &String| match address.parse::<SocketAddr>() {
                Ok(at) if at.ip().is_unspecified() => SocketAddr::new(first, at.port()).to_string(),
                _ => address.clone(),
            };
            let addresses: Vec<String> = addresses.iter().map(reachable).collect();
            data.link(settings, &addresses, deadline + Duration::from_secs(5))?
        }
    };
    lines.send(&Message::Beat { number: 0, within: false }).map_err(failed(rank, "send to rank 0"))?;
    Ok((vec![(0, lines)], links))
}

/// Connects to the first address of `meet` that answers.
fn connect(meet: &str) -> io::Result<TcpStream> {
    let mut outcome = Err(io::ErrorKind::AddrNotAvailable.into());
    for address in meet.to_socket_addrs()? {
        outcome = TcpStream::connect_timeout(&address, Duration::from_secs(5));
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

/// Where a rank takes connections for links.
struct DataListener {
    listener: TcpListener,
    address: SocketAddr,
}

impl DataListener {
    fn new(ip: IpAddr, rank: usize) -> Result<Self, CommError> {
        let listener = TcpListener::bind((ip, 0)).map_err(failed(rank, "listen for other ranks"))?;
        listener.set_nonblocking(true).map_err(failed(rank, "listen for other ranks"))?;
        let address = listener.local_addr().map_err(failed(rank, "listen for other ranks"))?;
        Ok(Self { listener, address })
    }

    /// Connects to all ranks below this one, at `addresses`, and waits for those above.
    fn link(
        &self,
        settings: &JoinSettings,
        addresses: &[String],
        deadline: Instant,
    ) -> Result<Vec<Option<Box<dyn Link>>>, CommError> {
        let JoinSettings { rank, ranks, .. } = *settings;
        let mut links: Vec<Option<Box<dyn Link>>> = (0..ranks).map(|_| None).collect();
        let mut keep = |other: usize, stream: TcpStream| -> io::Result<()> {
            links[other] = Some(Box::new(TcpLink::new(stream)?));
            Ok(())
        };
        for (other, address) in addresses.iter().enumerate().take(rank) {
            let what = failed(rank, &format!("connect to rank {other} at {address}"));
            let stream = connect(address).map_err(&what)?;
            // Who it is, on a connection that carries nothing but what is exchanged afterwards.
            let mut hello = Greeting::new(settings, rank);
            hello.send(&stream).map_err(&what)?;
            keep(other, stream).map_err(&what)?;
        }
        let mut missing: Vec<usize> = (rank + 1..ranks).collect();
        while !missing.is_empty() {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    let Some(other) = Greeting::receive(&stream, settings) else { continue };
                    if let Some(at) = missing.iter().position(|rank| *rank == other) {
                        missing.swap_remove(at);
                        keep(other, stream).map_err(failed(rank, &format!("communicate with rank {other}")))?;
                    }
                }
                Err(_) if Instant::now() > deadline => {
                    return Err(CommError::Absent { ranks, absent: missing, waited: settings.wait });
                }
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
        Ok(links)
    }
}

/// The first bytes on a link: a digest of the token, and the rank.
struct Greeting([u8; 16]);

impl Greeting {
    fn new(settings: &JoinSettings, rank: usize) -> Self {
        // Not a secret: the token was checked when the ranks met. This tells apart groups that share machines.
        let digest = settings
            .token
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&digest.to_le_bytes());
        bytes[8..].copy_from_slice(&(rank as u64).to_le_bytes());
        Self(bytes)
    }

    fn send(&mut self, mut stream: &TcpStream) -> io::Result<()> {
        io::Write::write_all(&mut stream, &self.0)
    }

    /// The rank that has connected.
    fn receive(mut stream: &TcpStream, settings: &JoinSettings) -> Option<usize> {
        stream.set_nonblocking(false).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
        let mut bytes = [0; 16];
        io::Read::read_exact(&mut stream, &mut bytes).ok()?;
        (0..settings.ranks).find(|rank| Self::new(settings, *rank).0 == bytes)
    }
}

/// A number that is likely not to be in use.
fn fresh() -> u32 {
    use std::hash::{BuildHasher as _, Hasher as _};
    std::hash::RandomState::new().build_hasher().finish() as u32
}
