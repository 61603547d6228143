//! Hugging Face's hub: one request, and the origin of the token. The token itself is never shown.

use super::check::Check;
use grpo_files::redact_url;
use grpo_models::{Error, Hub, HubAccess, TokenSource};
use serde_json::json;
use std::time::Duration;

pub(super) fn checks(limit: Duration) -> Vec<Check> {
    let hub = Hub::from_env();
    let access = match hub.offline || !cfg!(feature = "hub") {
        true => None,
        false => Some(hub.check_access(limit)),
    };
    vec![judge(&hub, access.as_ref()), token(&hub, access.as_ref())]
}

type Access<'a> = Option<&'a Result<HubAccess, Error>>;

/// Judges the response of the hub; `None` if it was not asked.
fn judge(hub: &Hub, access: Access<'_>) -> Check {
    const ID: &str = "hub.access";
    let endpoint = redact_url(&hub.endpoint);
    let check = match access {
        None if hub.offline => Check::note(ID, "not asked, because HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"),
        None => Check::note(ID, "this program was built without downloads (feature `hub`)"),
        Some(Ok(_)) => Check::ok(ID, format!("{endpoint} responds")),
        Some(Err(error)) => Check::problem(
            ID,
            error.to_string(),
            "check the network, the proxy (HTTPS_PROXY) and HF_ENDPOINT; without a network, set HF_HUB_OFFLINE=1",
        ),
    };
    let is_reachable = access.map(Result::is_ok);
    check.with(json!({ "endpoint": endpoint, "is_offline": hub.offline, "is_reachable": is_reachable }))
}

fn token(hub: &Hub, access: Access<'_>) -> Check {
    const ID: &str = "hub.token";
    let source = hub.token_source.as_ref().map(|source| match source {
        TokenSource::Variable(name) => (*name).to_owned(),
        TokenSource::File(path) => path.display().to_string(),
    });
    let is_accepted = match access {
        Some(Ok(HubAccess::TokenAccepted)) => Some(true),
        Some(Ok(HubAccess::TokenRefused)) => Some(false),
        _ => None,
    };
    let check = match (&source, is_accepted) {
        (None, _) => Check::ok(ID, "none; private and gated models need one (HF_TOKEN, or `hf auth login`)"),
        (Some(source), Some(true)) => Check::ok(ID, format!("from {source}, and the hub accepts it")),
        (Some(source), Some(false)) => Check::problem(
            ID,
            format!("from {source}, and the hub refuses it, also for public models"),
            format!("replace it (`hf auth login`, HF_TOKEN), or remove it from {source}"),
        ),
        (Some(source), None) => Check::ok(ID, format!("from {source}; the hub did not check it")),
    };
    check.with(json!({ "source": source, "is_accepted": is_accepted }))
}

#[cfg(test)]
mod tests {
    use super::super::check::Status;
    use super::*;

    #[test]
    fn tokens_and_passwords_are_in_no_check() {
        const SECRET: &str = "S3CR3T";
        let hub = Hub {
            token: Some(SECRET.into()),
            token_source: Some(TokenSource::Variable("HF_TOKEN")),
            endpoint: format!("http://user:{SECRET}@127.0.0.1:1/?key={SECRET}"),
            ..Hub::from_env()
        };
        let failed = Err(Error::HubAccess { reason: "no response".into() });
        let all = [Some(Ok(HubAccess::TokenAccepted)), Some(Ok(HubAccess::TokenRefused)), Some(failed), None];
        let expected = [Status::Ok, Status::Problem, Status::Ok, Status::Ok];
        for (access, expected) in all.iter().zip(expected) {
            let found = [judge(&hub, access.as_ref()), token(&hub, access.as_ref())];
            assert_eq!(found[1].status, expected, "{found:?}");
            let text = serde_json::to_string(&found).expect("JSON");
            assert!(!text.contains(SECRET) && text.contains("HF_TOKEN"), "{text}");
        }
        assert_eq!(judge(&hub, all[2].as_ref()).status, Status::Problem);
    }
}
