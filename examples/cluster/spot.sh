#!/bin/bash
# Runs a worker on a spot instance: when the provider announces that it takes the machine away, the
# worker gets SIGTERM. All workers then write a checkpoint after the same step and leave with 143.
#
#     spot.sh lbbsp launch --hosts ... --rank 1 train.py
#
# SPOT_NOTICE: address that answers 200 once the end is announced, by default that of Amazon EC2.
# Google Cloud: SPOT_NOTICE='http://metadata.google.internal/computeMetadata/v1/instance/preempted'
#     SPOT_HEADER='Metadata-Flavor: Google' SPOT_ANSWER=TRUE
set -u

notice=${SPOT_NOTICE:-http://169.254.169.254/latest/meta-data/spot/instance-action}
token_address=${SPOT_TOKEN-http://169.254.169.254/latest/api/token}
[ -z "${SPOT_NOTICE:-}" ] || token_address=${SPOT_TOKEN-}
header=${SPOT_HEADER:-}
seconds=${SPOT_SECONDS:-5}

if [ $# = 0 ]; then
    echo "usage: spot.sh COMMAND [ARGS]..." >&2
    exit 2
fi
if ! command -v curl >/dev/null; then
    echo "spot.sh needs curl: install it" >&2
    exit 127
fi

# Prints the answer if its status is 200 (a redirect, as to a page to log in, announces nothing),
# and returns 2 without any. The provider's server belongs to this machine: no proxy reaches it.
ask() {
    local answer
    answer=$(curl --silent --max-time 2 --noproxy '*' --write-out '\n%{http_code}' "$@") || return 2
    [ "${answer##*$'\n'}" = 200 ] && echo "${answer%$'\n'*}"
}

announced() {
    local own=$header answer
    if [ -n "$token_address" ]; then # EC2 answers those only who have asked for a token
        answer=$(ask --request PUT --header 'X-aws-ec2-metadata-token-ttl-seconds: 60' \
            "$token_address") || return
        own="X-aws-ec2-metadata-token: $answer"
    fi
    answer=$(ask --header "$own" "$notice") || return
    grep -q "${SPOT_ANSWER:-.}" <<<"$answer"
}

# Runs beside the worker, so that slow answers delay no signal and no end. What it starts does not
# have the output of this script, which ends with it.
watch() {
    local warned='' status
    while kill -0 "$worker"; do
        announced 3>&-
        status=$?
        if [ $status = 0 ]; then
            kill -TERM "$worker"
            return
        elif [ $status = 2 ] && [ -z "$warned" ]; then
            echo "spot.sh: the provider does not answer at $notice: correct SPOT_NOTICE" >&3
            warned=1
        fi
        sleep "$seconds" 3>&-
    done
}

worker=
asked=
trap 'asked=1; [ -z "$worker" ] || kill -TERM "$worker" 2>/dev/null' TERM INT
"$@" &
worker=$!
[ -z "$asked" ] || kill -TERM "$worker" 2>/dev/null
watch 3>&2 >/dev/null 2>&1 &
watcher=$!
disown "$watcher" # its end is no news

while # a signal interrupts the wait, and the worker runs on
    asked=
    wait "$worker"
    status=$?
    [ -n "$asked" ]
do :; done
kill "$watcher" 2>/dev/null
exit "$status"
