{{- define "fedpress.name" -}}
{{- .Release.Name | trunc 48 | trimSuffix "-" -}}
{{- end -}}

{{- define "fedpress.selector" -}}
app.kubernetes.io/name: fedpress
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "fedpress.labels" -}}
{{ include "fedpress.selector" . }}
app.kubernetes.io/version: {{ .Values.image.tag | default .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "fedpress.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* Settings of every server, and of migrate. Secrets come from files, so that `kubectl describe` shows none. */}}
{{- define "fedpress.environment" -}}
{{- $own := dict
  "FEDPRESS_DATA_DIR" "/data/server"
  "FEDPRESS_PORT" "8080"
  "FEDPRESS_ADMIN_HOST" "0.0.0.0"
  "FEDPRESS_ADMIN_PORT" "8081"
  "FEDPRESS_ADMIN_TOKEN_FILE" "/run/secrets/fedpress/admin-token"
  "FEDPRESS_METRICS_TOKEN_FILE" "/run/secrets/fedpress/metrics-token"
  "FEDPRESS_DATABASE_URL_FILE" "/run/secrets/fedpress/database-url"
  "FEDPRESS_SERVER_KEY_FILE" "/run/secrets/fedpress-keys/server-key.pem"
  "FEDPRESS_STORE_URL" .Values.store.url
  "FEDPRESS_STORE_CACHE_BYTES" (int64 .Values.store.cacheBytes | toString)
-}}
{{- if .Values.authority }}{{ $_ := set $own "FEDPRESS_AUTHORITY_KEY_FILE" "/run/secrets/fedpress-keys/authority-key.pem" }}{{ end -}}
{{- with .Values.store.endpoint }}{{ $_ := set $own "FEDPRESS_STORE_ENDPOINT" . }}{{ end -}}
{{- with .Values.store.region }}{{ $_ := set $own "FEDPRESS_STORE_REGION" . }}{{ end -}}
{{- with .Values.store.accessKeyId }}
{{- $_ := set $own "FEDPRESS_STORE_ACCESS_KEY_ID" . }}
{{- $_ := set $own "FEDPRESS_STORE_SECRET_ACCESS_KEY_FILE" "/run/secrets/fedpress/store-secret" }}
{{- end -}}
{{- with .Values.trustedProxies }}{{ $_ := set $own "FEDPRESS_TRUSTED_PROXIES" . }}{{ end -}}
{{- range $name := keys .Values.settings }}
{{- if or (hasKey $own $name) (has $name (list "FEDPRESS_ROLE" "FEDPRESS_DRAIN_SECONDS" "FEDPRESS_SHUTDOWN_SECONDS" "FEDPRESS_HOST")) }}
{{- fail (printf "settings.%s: the chart sets it itself; see values.yaml" $name) }}
{{- end }}
{{- if has $name (list "FEDPRESS_ADMIN_TOKEN" "FEDPRESS_METRICS_TOKEN" "FEDPRESS_DATABASE_URL" "FEDPRESS_STORE_SECRET_ACCESS_KEY" "AWS_SECRET_ACCESS_KEY") }}
{{- fail (printf "settings.%s: no value of this chart is a secret; put it into the Secret %s" $name $.Values.secrets.settings) }}
{{- end }}
{{- end }}
{{- range $name, $value := merge (dict) $own .Values.settings }}
- {name: {{ $name }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- end -}}

{{- define "fedpress.mounts" -}}
- {name: settings, mountPath: /run/secrets/fedpress, readOnly: true}
- {name: keys, mountPath: /run/secrets/fedpress-keys, readOnly: true}
- {name: data, mountPath: /data}
- {name: tmp, mountPath: /tmp}
{{- end -}}

{{- define "fedpress.volumes" -}}
- {name: settings, secret: {secretName: {{ .Values.secrets.settings }}, defaultMode: 0440}}
- {name: keys, secret: {secretName: {{ .Values.secrets.keys }}, defaultMode: 0440}}
- {name: data, emptyDir: {sizeLimit: {{ .Values.volumes.dataLimit }}}}
- {name: tmp, emptyDir: {sizeLimit: {{ .Values.volumes.temporaryLimit }}}}
{{- end -}}

{{- define "fedpress.confined" -}}
readOnlyRootFilesystem: true
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "fedpress.pod" -}}
automountServiceAccountToken: {{ .Values.mountServiceAccountToken }}
serviceAccountName: {{ .Values.serviceAccountName }}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A Deployment of one role. Arguments: the chart's root, the role, its values, seconds before and after SIGTERM. */}}
{{- define "fedpress.deployment" -}}
{{- $root := index . 0 }}{{- $role := index . 1 }}{{- $values := index . 2 }}{{- $preStop := index . 3 -}}
{{- $drain := $values.drainSeconds | default 0 }}{{- $shutdown := $values.shutdownSeconds | default 10 -}}
{{- $scales := and $values.autoscaling $values.autoscaling.enabled -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "fedpress.name" $root }}-{{ $role }}
  labels:
    {{- include "fedpress.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ $role }}
spec:
  {{- if $root.Values.stopped }}
  replicas: 0
  {{- else if not $scales }}
  replicas: {{ $values.replicas }}
  {{- end }}
  revisionHistoryLimit: 5
  strategy:
    type: RollingUpdate
    rollingUpdate: {maxSurge: 1, maxUnavailable: 0} # a new server is ready before an old one is told to stop
  selector:
    matchLabels:
      {{- include "fedpress.selector" $root | nindent 6 }}
      app.kubernetes.io/component: {{ $role }}
  template:
    metadata:
      labels:
        {{- include "fedpress.labels" $root | nindent 8 }}
        app.kubernetes.io/component: {{ $role }}
        {{- with $root.Values.podLabels }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- with $root.Values.podAnnotations }}
      annotations: {{ toYaml . | nindent 8 }}
      {{- end }}
    spec:
      {{- include "fedpress.pod" $root | nindent 6 }}
      terminationGracePeriodSeconds: {{ add $preStop $drain $shutdown 20 }}
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels:
              {{- include "fedpress.selector" $root | nindent 14 }}
              app.kubernetes.io/component: {{ $role }}
      containers:
        - name: {{ $role }}
          image: {{ include "fedpress.image" $root | quote }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          args: [server, run]
          env:
            - {name: FEDPRESS_ROLE, value: {{ $role }}}
            - {name: FEDPRESS_HOST, value: 0.0.0.0}
            - {name: FEDPRESS_DRAIN_SECONDS, value: {{ $drain | quote }}}
            - {name: FEDPRESS_SHUTDOWN_SECONDS, value: {{ $shutdown | quote }}}
            {{- include "fedpress.environment" $root | nindent 12 }}
          ports:
            - {name: devices, containerPort: 8080}
            - {name: operators, containerPort: 8081}
          # Liveness: the process answers. A database or a store that is away is no reason to restart it.
          startupProbe:
            httpGet: {path: /livez, port: devices}
            periodSeconds: 2
            failureThreshold: 60
          livenessProbe:
            httpGet: {path: /livez, port: devices}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          # Readiness: database, store and signing key are there, and the server is not about to stop.
          readinessProbe:
            httpGet: {path: /readyz, port: devices}
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: 2
          {{- if $preStop }}
          lifecycle:
            preStop: {exec: {command: [sleep, {{ $preStop | quote }}]}}
          {{- end }}
          securityContext:
            {{- include "fedpress.confined" $root | nindent 12 }}
          resources: {{ toYaml $values.resources | nindent 12 }}
          volumeMounts:
            {{- include "fedpress.mounts" $root | nindent 12 }}
      volumes:
        {{- include "fedpress.volumes" $root | nindent 8 }}
{{- end -}}

{{- define "fedpress.autoscaler" -}}
{{- $root := index . 0 }}{{- $role := index . 1 }}{{- $scaling := index . 2 -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ include "fedpress.name" $root }}-{{ $role }}
  labels:
    {{- include "fedpress.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ $role }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ include "fedpress.name" $root }}-{{ $role }}}
  minReplicas: {{ $scaling.min }}
  maxReplicas: {{ $scaling.max }}
  behavior:
    scaleDown: {stabilizationWindowSeconds: 600} # devices come back in waves
  metrics:
    - type: Resource
      resource:
        name: cpu
        target: {type: Utilization, averageUtilization: {{ $scaling.cpuPercent }}}
    {{- if $scaling.waitingCheckIns }}
    - type: Pods
      pods:
        metric: {name: fedpress_waiting_check_ins}
        target: {type: AverageValue, averageValue: {{ $scaling.waitingCheckIns | quote }}}
    {{- end }}
{{- end -}}
