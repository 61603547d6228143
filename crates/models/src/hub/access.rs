//! One request to the hub: does it respond, and does it accept the token?

use super::http::{Client, Failure};
use super::{Hub, HubAccess};
use std::time::Duration;

/// The path of the hub that names the owner of a token; without a token, its status is 401.
const OWNER: &str = "/api/whoami-v2";

/// Makes the request; the error is the reason why there is no response.
pub(super) fn check(hub: &Hub, limit: Duration) -> Result<HubAccess, String> {
    let hub = Hub { etag_timeout: limit, ..hub.clone() };
    let client = Client::new(&hub).map_err(|failure| reason(failure, &hub.endpoint, limit))?;
    match client.get(OWNER, None, client.metadata) {
        Ok(_) if hub.token.is_some() => Ok(HubAccess::TokenAccepted),
        Err(Failure::Status(401 | 403)) if hub.token.is_some() => Ok(HubAccess::TokenRefused),
        // Mirrors have no such path.
        Ok(_) | Err(Failure::Status(_)) => Ok(HubAccess::Reachable),
        Err(failure) => Err(reason(failure, &client.shown(), limit)),
    }
}

fn reason(failure: Failure, address: &str, limit: Duration) -> String {
    match failure {
        Failure::Stalled(_) => format!("{address} does not respond within {} s", limit.as_secs_f64()),
        Failure::Broken(reason) | Failure::Final(reason) => reason,
        Failure::Status(status) => format!("{address} answers with status {status}"),
    }
}
