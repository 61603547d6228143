//! Messages and their frames.
//!
//! | bytes | field |
//! |---|---|
//! | 4 | the length of the rest, little-endian |
//! | 1 | the verb |
//! | 8 | the id of a request and of its reply, little-endian |
//! | 2 | the length of the key, little-endian |
//! | | the key, UTF-8 |
//! | | the value |

use crate::options::{MAX_KEY, MAX_VALUE};
use std::io::{Error, ErrorKind, Read, Result, Write};

/// The first bytes of a connection.
pub(crate) const PREAMBLE: [u8; 8] = *b"GRPOSTOR";

/// The length of a frame without key and value, after its length.
const FIXED: usize = 11;

/// The largest length of a frame.
pub(crate) const MAX_FRAME: usize = FIXED + MAX_KEY + MAX_VALUE;

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Verb {
    /// The first message of a follower: its numbers and facts.
    Hello = 1,
    /// The leader accepts the follower.
    Welcome,
    /// A process has failed; the value is a [`crate::link::Failure`].
    Failure,
    /// A sign of life.
    Heartbeat,
    /// Sets the value of a key.
    Put,
    /// Requests a value that may not exist yet.
    Get,
    /// Requests a value that exists.
    TryGet,
    /// The reply to a request: the value.
    Value,
    /// The reply to a request: there is no value.
    Nothing,
    /// The reply to a put: the key has another value.
    Exists,
    /// The reply to a put or get: the store is full.
    Full,
    /// The process has reached a barrier; the value is its token.
    Arrive,
    /// All processes have reached the barrier.
    Release,
    /// A part of a broadcast, which is not the last.
    Part,
    /// The last part of a broadcast.
    Broadcast,
}

impl Verb {
    const ALL: [Self; 15] = [
        Self::Hello,
        Self::Welcome,
        Self::Failure,
        Self::Heartbeat,
        Self::Put,
        Self::Get,
        Self::TryGet,
        Self::Value,
        Self::Nothing,
        Self::Exists,
        Self::Full,
        Self::Arrive,
        Self::Release,
        Self::Part,
        Self::Broadcast,
    ];
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) verb: Verb,
    /// The id of a request; 0 in other messages.
    pub(crate) id: u64,
    pub(crate) key: String,
    pub(crate) value: Vec<u8>,
}

/// Writes a message, whose sizes were checked.
pub(crate) fn write(to: &mut impl Write, verb: Verb, id: u64, key: &str, value: &[u8]) -> Result<()> {
    let length = FIXED + key.len() + value.len();
    let mut head = Vec::with_capacity(4 + FIXED + key.len());
    head.extend_from_slice(&(length as u32).to_le_bytes());
    head.push(verb as u8);
    head.extend_from_slice(&id.to_le_bytes());
    head.extend_from_slice(&(key.len() as u16).to_le_bytes());
    head.extend_from_slice(key.as_bytes());
    to.write_all(&head)?;
    to.write_all(value)
}

/// Reads a message of at most `limit` bytes. Memory grows with the bytes that arrive, not with the announced length.
///
/// # Errors
/// [`ErrorKind::InvalidData`] for bytes that are not a message; the errors of the reader.
pub(crate) fn read(from: &mut impl Read, limit: usize) -> Result<Message> {
    let invalid = |reason: String| Error::new(ErrorKind::InvalidData, reason);
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if !(FIXED..=limit).contains(&length) {
        return Err(invalid(format!("it sends a message of {length} bytes, expected {FIXED} to {limit}")));
    }
    let mut head = [0; FIXED];
    from.read_exact(&mut head)?;
    let [verb, rest @ ..] = head;
    let (mut id, mut key_length) = ([0; 8], [0; 2]);
    id.copy_from_slice(&rest[..8]);
    key_length.copy_from_slice(&rest[8..]);
    let Some(verb) = Verb::ALL.into_iter().find(|known| *known as u8 == verb) else {
        return Err(invalid(format!("it sends a message of the unknown kind {verb}")));
    };
    let key_length = usize::from(u16::from_le_bytes(key_length));
    if key_length > MAX_KEY || FIXED + key_length > length {
        return Err(invalid(format!("it sends a key of {key_length} bytes in a message of {length} bytes")));
    }
    let mut key = vec![0; key_length];
    from.read_exact(&mut key)?;
    let key = String::from_utf8(key).map_err(|error| invalid(format!("it sends a key that is not UTF-8: {error}")))?;
    let (mut value, rest) = (Vec::new(), length - FIXED - key_length);
    if from.take(rest as u64).read_to_end(&mut value)? < rest {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(Message { verb, id: u64::from_le_bytes(id), key, value })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(verb: u8, key: &[u8], value: &[u8], key_length: usize, length: usize) -> Vec<u8> {
        let mut bytes = (length as u32).to_le_bytes().to_vec();
        bytes.push(verb);
        bytes.extend_from_slice(&7_u64.to_le_bytes());
        bytes.extend_from_slice(&(key_length as u16).to_le_bytes());
        [&bytes, key, value].concat()
    }

    #[test]
    fn messages_are_read_as_written() {
        let mut bytes = Vec::new();
        for verb in Verb::ALL {
            for (key, value) in [("", &b""[..]), ("a key", &[0, 255]), ("ключ", &[7; 100_000])] {
                bytes.clear();
                write(&mut bytes, verb, u64::MAX, key, value).unwrap();
                let expected = Message { verb, id: u64::MAX, key: key.into(), value: value.into() };
                assert_eq!(read(&mut &bytes[..], MAX_FRAME).unwrap(), expected);
                assert!(read(&mut &bytes[..bytes.len() - 1], MAX_FRAME).is_err());
            }
        }
    }

    #[test]
    fn malformed_frames_are_refused() {
        let kind = |bytes: &[u8]| read(&mut &bytes[..], 100).unwrap_err();
        assert_eq!(read(&mut &frame(5, b"ab", b"cde", 2, FIXED + 5)[..], 100).unwrap().value, b"cde");
        for (bytes, words) in [
            (frame(5, b"", b"", 0, FIXED - 1), "10 bytes"),
            (frame(5, b"", b"", 0, 101), "101 bytes, expected 11 to 100"),
            (frame(5, b"", b"", 0, u32::MAX as usize), "4294967295 bytes"),
            (frame(0, b"", b"", 0, FIXED), "unknown kind 0"),
            (frame(16, b"", b"", 0, FIXED), "unknown kind 16"),
            (frame(5, b"ab", b"", 3, FIXED + 2), "a key of 3 bytes"),
            (frame(5, b"", b"", usize::from(u16::MAX), FIXED), "a key of 65535 bytes"),
            (frame(5, &[0xff, 0xfe], b"", 2, FIXED + 2), "not UTF-8"),
        ] {
            let error = kind(&bytes);
            assert!(error.kind() == ErrorKind::InvalidData && error.to_string().contains(words), "{error}");
        }
        for bytes in [&b"GET"[..], &frame(5, b"a", b"", 1, FIXED + 4)] {
            assert_eq!(kind(bytes).kind(), ErrorKind::UnexpectedEof);
        }
    }
}
