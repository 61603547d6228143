//! A local HTTP server.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};

/// The status, further lines of the head, and the body of a reply.
pub(crate) type Reply = (u16, String, Vec<u8>);

/// Starts a server and returns its address. `reply` gets the head and the body of a request.
pub(crate) fn serve(reply: impl Fn(&str, &[u8]) -> Reply + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    std::thread::spawn(move || listener.incoming().flatten().for_each(|stream| drop(answer(&stream, &reply))));
    address
}

fn answer(mut stream: &TcpStream, reply: &impl Fn(&str, &[u8]) -> Reply) -> std::io::Result<()> {
    let (mut reader, mut head, mut length) = (BufReader::new(stream), String::new(), 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line == "\r\n" {
            break;
        }
        if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap_or(0);
        }
        head.push_str(&line);
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let (status, lines, body) = reply(&head, &body);
    let length = body.len();
    write!(stream, "HTTP/1.1 {status} Said\r\n{lines}Content-Length: {length}\r\nConnection: close\r\n\r\n")?;
    if head.starts_with("HEAD") { Ok(()) } else { stream.write_all(&body) }
}
